"""Evidence about one-step students: its claims, their toy dataset and baselines, and its section of the report page."""
