"""Evidence: claims about the engine, their measurement, and the report pages.

The engine does not depend on it: only ``cli`` imports it.
"""
