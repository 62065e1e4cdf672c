"""Evidence about activation taps and features: its claims, their world and baselines, and its section of the report."""
