"""Noise schedules, the denoiser that wraps every model convention, guidance and the sampling loop."""
