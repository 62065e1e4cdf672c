"""The evidence wing: what is claimed of the engine, how it is measured, and the pages that show it.

It stands beside the product and is never under it: only ``engine/cli`` imports it.
"""
