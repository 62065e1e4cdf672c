"""NEMO (Hintersdorf et al. 2024): find the cross-attention value neurons that memorize, block them, prove it."""
