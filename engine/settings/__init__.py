"""Settings as frozen dataclasses, and checks of input before any work."""
