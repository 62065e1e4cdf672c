"""From a folder of LoRAs to a space, and from a LoRA to its place in one."""
