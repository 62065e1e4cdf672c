"""Evidence about activation taps and features: claims, test environment, baselines, and the report section."""
