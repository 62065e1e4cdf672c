"""Resolution transfer (Berrada et al. 2024): noise schedule, positions and guidance for another picture size."""
