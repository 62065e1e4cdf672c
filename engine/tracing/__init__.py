"""Name, read and write activations in a running forward."""
