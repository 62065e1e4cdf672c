"""When a test gives up on a state that it waits for."""

HANGS = 1200
"""Seconds after which a state will not come any more: no bound on how fast a machine is, but an end for what hangs."""
