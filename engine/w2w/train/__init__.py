"""Trains the LoRAs of a space, many at once."""
