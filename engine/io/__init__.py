"""File formats: atomic writes; readers of images, prompts, tables and folders; the writer of LoRAs."""
