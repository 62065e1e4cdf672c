"""Evidence about control conditioning: claims, test environment, baselines, and the report section."""
