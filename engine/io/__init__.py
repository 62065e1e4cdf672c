"""Files in and out: whole writes, the one reader of pictures, prompts, tables and folders, the one writer of LoRAs."""
