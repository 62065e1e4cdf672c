"""The ``vitrine`` command."""
