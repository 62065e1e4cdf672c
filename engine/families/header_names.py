"""Names of base models as headers of LoRA files write them."""

import re

NAMED_IN_HEADERS = (
    ("SDXL", r"sdxl|stable-diffusion-xl|sd_xl"),
    ("Stable Diffusion 3", r"sd3|stable-diffusion-3"),
    ("Stable Diffusion 2", r"sd_v2|sd2|stable-diffusion-2|stable-diffusion-v2"),
    ("Stable Diffusion 1", r"sd_v1|sd1|stable-diffusion-v1|stable-diffusion-1"),
    ("Flux.2 Klein", r"flux.?2.?klein"),
    ("Flux.2", r"flux.?2"),
    ("Flux", r"flux"),
    ("Qwen-Image", r"qwen"),
    ("Wan", r"\bwan"),
    ("HiDream", r"hidream"),
    ("Z-Image", r"z.?image"),
    ("PixArt", r"pixart"),
    ("HunyuanVideo", r"hunyuan"),
    ("Anima", r"\banima\b"),
)
"""Beginning of a base model's name -> pattern of it in headers."""


def base_in_header(said: str) -> str:
    """The beginning of a base model's name that a header means; empty if it is not known.

    Example:
        >>> base_in_header("sdxl_base_v1-0"), base_in_header("my_merge")
        ('SDXL', '')
    """
    return next((name for name, pattern in NAMED_IN_HEADERS if re.search(pattern, said, re.IGNORECASE)), "")
