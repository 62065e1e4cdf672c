"""The lists of module names in ``engine/families/modules`` are those of both libraries' real classes.

``VITRINE_WRITE_MODULES=1`` writes them.
"""

import os
from pathlib import Path

import pytest
import vitrine
from vitrine.engine.families import FAMILIES
from vitrine_tests.engine.families.real_classes import comfyui_networks, diffusers_networks, templates

FILES = {
    "Anima": "anima", "Chroma": "chroma", "Flux": "flux", "Flux.2": "flux2", "HiDream": "hidream", "Krea 2": "krea2",
    "Lumina 2": "lumina2", "PixArt": "pixart", "Qwen-Image": "qwen_image", "SD3": "sd3", "UNet": "unet", "Wan": "wan",
    "Z-Image": "z_image",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_list_is_that_of_the_real_classes(comfy, family):
    theirs = set().union(*map(templates, comfyui_networks(family.name)))
    real = theirs.union(*map(templates, diffusers_networks(family.name)))
    assert len(theirs) > 10
    if os.environ.get("VITRINE_WRITE_MODULES"):
        path = Path(vitrine.__file__).parent / "engine/families/modules" / f"{FILES[family.name]}.txt"
        path.write_text("\n".join(sorted(real)) + "\n", encoding="utf-8")
        return
    assert sorted(family.modules) == sorted(real)
