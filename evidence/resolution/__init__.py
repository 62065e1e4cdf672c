"""Evidence about resolution transfer: its claims, their world and baselines, and its section of the report."""
