"""Resumable jobs: ``Run``, digests of its inputs, and helpers for training."""
