"""Look Inside (Activation Tap): read any activation of a diffusion model (GDF, arXiv 2410.03558, NeurIPS 2024).

``TapConfig`` or a preset selects sites; ``tap_latents`` taps given images, ``tap_steps`` taps a running sampler;
``Activations`` is the result, ``ActivationWriter`` streams many of them, ``pca_rgb`` renders them.
"""

from .activation_pictures import PCABasis, pca_rgb, text_maps, word_map
from .container import Activations, TapInfo
from .picture_latents import encode_pixels, to_pixels
from .presets import PRESETS, Preset, preset
from .tap import check_timestep, gdf_noise, massive_channels, tap_latents, tap_timesteps
from .tap_config import TapConfig
from .tap_during_sampling import DIFFUSERS_GUIDED, StepRecord, tap_steps
from .writer import ActivationReader, ActivationWriter

__all__ = [
    "DIFFUSERS_GUIDED", "PRESETS", "ActivationReader", "ActivationWriter", "Activations", "PCABasis", "Preset",
    "StepRecord", "TapConfig", "TapInfo", "check_timestep", "encode_pixels", "gdf_noise", "massive_channels", "pca_rgb",
    "preset", "tap_latents", "tap_steps", "tap_timesteps", "text_maps", "to_pixels", "word_map",
]  # fmt: skip
