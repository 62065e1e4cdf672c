"""Builds a space from a folder of LoRAs, and projects LoRAs into a space."""
