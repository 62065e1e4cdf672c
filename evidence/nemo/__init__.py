"""Evidence about memorization and blocking: its claims, their world and baselines, and its section of the demo page."""
