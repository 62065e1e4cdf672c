"""Sampling, editing and inverting models of a space."""
