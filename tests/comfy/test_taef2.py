"""A published VAE in graphs of real ComfyUI: TAEF2, of Flux.2, whose factor core takes for 8 where it is 16."""

import importlib.resources
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from vitrine.engine.errors import VitrineError
from vitrine_tests.comfy.test_lora_files import loras_in
from vitrine_tests.comfy.tiny_checkpoints import checkpoint
from vitrine_tests.published.weights import entry_of, file_of, keep

PHOTOGRAPHS = {
    "skimage.data": ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"),
    "sklearn.datasets.images": ("china.jpg", "flower.jpg"),
}
"""Package -> photographs that it ships."""
SIDE = 256
PROMPT = "a photograph of a cat"


@pytest.fixture(scope="module")
def photographs():
    """name -> IMAGE (1, 256, 256, 3): the middle of each."""
    images = {}
    for package, names in PHOTOGRAPHS.items():
        pytest.importorskip(package.split(".")[0])
        for name in names:
            with importlib.resources.as_file(importlib.resources.files(package) / name) as path:
                picture = Image.open(path).convert("RGB")
            side = min(picture.size)
            left, top = ((length - side) // 2 for length in picture.size)
            square = picture.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
            images[name] = torch.from_numpy(np.asarray(square).copy())[None] / 255
    return images


@pytest.fixture(scope="module")
def vae(comfy, tmp_path_factory):
    """As *Load VAE* gives it."""
    import folder_paths

    folder = tmp_path_factory.mktemp("vae_approx")
    for part in ("encoder", "decoder"):
        shutil.copy(file_of(entry_of(f"taef2_{part}.pth")), folder)
    folder_paths.add_model_folder_path("vae_approx", str(folder), is_default=True)
    node = comfy.nodes.NODE_CLASS_MAPPINGS["VAELoader"]
    assert "taef2" in node.INPUT_TYPES()["required"]["vae_name"][0]
    return node().load_vae("taef2")[0]


@pytest.fixture(scope="module")
def models(comfy, vae, tmp_path_factory):
    """MODEL and CLIP of Klein, small, with the published VAE."""
    with torch.no_grad():
        model, clip, _ = checkpoint("klein", tmp_path_factory.mktemp("klein"))
    return {"model": model, "clip": clip, "vae": vae}


def test_round_trips_of_photographs(comfy, vae, photographs):
    nodes, ratios = comfy.nodes.NODE_CLASS_MAPPINGS, {}
    for name, image in photographs.items():
        with torch.inference_mode():
            (latent,) = nodes["VAEEncode"]().encode(vae, image)
            (back,) = nodes["VAEDecode"]().decode(vae, latent)
        assert latent["samples"].shape == (1, 128, SIDE // 16, SIDE // 16) and back.shape == image.shape
        ratios[name] = round(float(-10 * (back - image).square().mean().log10()), 1)
    keep("TAEF2 round trips, dB", ratios)
    assert all(20 < ratio < 45 for ratio in ratios.values()), ratios


def test_its_factor_is_measured(vae):
    from vitrine.nodes.comfy.model import pixels_per_latent

    assert vae.spacial_compression_encode() == 8 and pixels_per_latent(vae) == 16


def encoded(comfy, models):
    with torch.inference_mode():
        return comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(models["clip"], PROMPT)[0]


def test_tap_and_word_map_of_a_photograph(comfy, models, photographs):
    image, positive = photographs["chelsea.png"], encoded(comfy, models)
    taps, drawn, report = comfy.call(
        "VitrineActivationTap",
        model=models["model"],
        vae=models["vae"],
        image=image,
        positive=positive,
        selection="layers below",
        layers="auto",
        timestep=300.0,
        seed=0,
        ensemble=1,
        dtype="float32",
    )
    (tap,) = taps.values()
    assert tuple(tap.grid) == (16, 16) and bool(tap.tensor.isfinite().all()), report
    _, mask = comfy.call(
        "VitrineWordMap", image=image, word="cat", seed=0, timestep=300.0, prompt=PROMPT, positive=positive, **models
    )
    assert mask.shape == (1, SIDE, SIDE) and float(mask.std()) > 0


@pytest.mark.parametrize("width", [248, 264])
def test_a_size_that_is_no_multiple_of_16_is_refused(comfy, models, photographs, width):
    image = torch.nn.functional.pad(photographs["chelsea.png"], (0, 0, 0, 8))[:, :, :width]
    with pytest.raises(VitrineError, match=f"image size: given {width} x 256; accepted: multiples of 16"):
        comfy.call(
            "VitrineWordMap",
            image=image,
            word="cat",
            seed=0,
            timestep=300.0,
            prompt=PROMPT,
            positive=encoded(comfy, models),
            **models,
        )


CHECK = {
    "prompts": PROMPT,
    "ordinary": "a red bicycle\na stone bridge",
    "seeds": 2,
    "first_seed": 2000,
    "steps": 2,
    "cfg": 2.0,
    "sampler_name": "euler",
    "scheduler": "simple",
    "tau": 0.0,
    "timestep_index": 1,
}


@pytest.mark.parametrize("side", [8, 16])
def test_copy_check(comfy, models, photographs, side):
    latent = {"samples": torch.zeros(2, 128, side, side)}
    report, rows, _ = comfy.call(
        "VitrineNEMOCopyCheck",
        **models,
        **CHECK,
        latent=latent,
        name=f"taef2 {side}",
        pictures=torch.cat(list(photographs.values())),
    )
    assert rows.shape == (1, 16 * side, 3 * 16 * side, 3), report


def test_lora_report(comfy, models, photographs, tmp_path):
    path = "double_blocks.0.img_attn.proj"
    weight = models["model"].model.diffusion_model.get_submodule(path).weight
    g = torch.Generator().manual_seed(0)
    down, up = torch.randn(2, weight.shape[1], generator=g), torch.randn(len(weight), 2, generator=g)
    stem = f"diffusion_model.{path}"
    save_file({f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}, tmp_path / "a.safetensors")
    with loras_in(tmp_path):
        report, shown, folder = comfy.call(
            "VitrineLoRAReport", **models, latent={"samples": torch.zeros(1, 128, 8, 8)}, lora="a.safetensors",
            captions=PROMPT, trigger="", ordinary=CHECK["ordinary"], seeds=2, minutes=0.0, first_seed=2000, steps=2,
            cfg=2.0, prompts=1, compare=False, name="taef2", pictures=torch.cat(list(photographs.values())),
        )  # fmt: skip
    assert shown.shape == (1, 128, 256, 3) and "copies a training picture" in report, report
