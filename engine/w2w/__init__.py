"""weights2weights (Dravid et al. 2024): a space of models built from LoRAs; sample, edit, invert."""
