"""Settings as frozen dataclasses, and the checks that are made before any work."""
