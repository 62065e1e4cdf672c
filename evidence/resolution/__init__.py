"""Evidence about resolution transfer: claims, test environment, baselines, and the report section."""
