"""Evidence about one-step students: its claims, their world and baselines, and its section of the report page."""
