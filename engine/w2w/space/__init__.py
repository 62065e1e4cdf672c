"""A space of models: its file, its principal components, directions and map."""
