"""Evidence about spaces of LoRAs: its claims, their world and baselines, and its section of the report."""
