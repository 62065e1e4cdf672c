"""Evidence about the embedded model: its claims, their world and baselines, and its section of the report."""
