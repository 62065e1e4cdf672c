"""Control conditioning (Berrada et al. 2024): size, crop and flip conditions with a noise-dependent weight."""
