"""The `vitrine` command."""
