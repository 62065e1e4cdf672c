"""LoRA files from anywhere: their spellings, their factors, and what can be compared."""
