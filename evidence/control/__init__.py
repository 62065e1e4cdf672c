"""Evidence about control conditioning: its claims, their world and baselines, and its section of the report."""
