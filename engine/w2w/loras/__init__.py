"""LoRA files from any trainer: key formats, factors, and whether they are comparable."""
