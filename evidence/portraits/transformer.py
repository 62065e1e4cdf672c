"""A second, PixArt-shaped model of the portraits world: same latents, same text encoder, transformer instead of UNet.

It has position embeddings, and its conditions are size, crop and flip: what the methods for control conditioning and
resolution transfer need. Text states come from the portraits model's own text encoder, which stays as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...engine.errors import refuse
from ...engine.io.files import read_safetensors, save_safetensors, write_folder
from ...engine.portraits.models import Portraits
from ...engine.portraits.scenes import ATTRIBUTES, Scenes
from ...engine.runtime.progress import Progress, silent

SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256)
SHARES = (0.08, 0.10, 0.14, 0.14, 0.22, 0.12, 0.12, 0.04, 0.04)
"""Original sizes in pixels and how often training meets them: below 64 pictures are blurred by enlarging."""
LINK = 0.9
"""Correlation of a picture's size with what its caption may leave unsaid (skin, hair colour, mouth, shirt, background).

In real collections size says something of the content: thumbnails, scans, stock photographs. Without a link a model
with size conditions has nothing wrong to learn from them.
"""
SIDED = {"hat": ("cap-left", "cap-right"), "mole": ("left", "right")}
"""Attributes with a side, and their two values."""
TRANSFORMER_CONFIG: dict[str, Any] = {
    "num_attention_heads": 3, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "num_layers": 5,
    "cross_attention_dim": 96, "sample_size": 16, "patch_size": 2, "caption_channels": 64,
    "norm_type": "ada_norm_single", "use_additional_conditions": False, "interpolation_scale": 1,
    "norm_elementwise_affine": False, "norm_eps": 1e-6,
}  # fmt: skip


def build_transformer(seed: int = 0, **changes: Any) -> Any:
    """The architecture with seeded random weights, float32 on the CPU; 0.97 million parameters."""
    from diffusers import PixArtTransformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PixArtTransformer2DModel(**TRANSFORMER_CONFIG | changes).eval()


class Collection(NamedTuple):
    """Which pictures to render.

    Attributes:
        mirrored: share of mirrored ones, 0 to 1.
        sides: share of pictures in which the attributes of ``SIDED`` are drawn anew, 0 to 1.
    """

    mirrored: float = 0.25
    sides: float = 0.0


AS_FOUND = Collection()


class TransformerData(NamedTuple):
    """Rows to train on: latents (N, 4, s, s) scaled, text states (N, 24, 64), controls by name (N,)."""

    latents: torch.Tensor
    text: torch.Tensor
    controls: dict[str, torch.Tensor]


@torch.no_grad()
def transformer_data(
    model: Portraits,
    count: int,
    side: int = 64,
    first: int = 0,
    crop: float = 0.7,
    progress: Progress = silent,
    kind: Collection = AS_FOUND,
) -> TransformerData:
    """Render, flip, crop, resize to ``side`` pixels, encode. Row i depends on its chunk of 128 numbers only.

    A collection as one finds them: small pictures show other things than large ones (``LINK``), captions leave things
    unsaid (each row a share of its own), some are mirrored while their captions stay, half are cropped to a side of
    ``crop`` to 1 of their own.
    """
    latents, texts, chunks = [], [], []
    chunk, dataset = 128, model.dataset
    for start in range(first, first + count, chunk):
        seeds = range(start, min(start + chunk, first + count))
        random = torch.Generator().manual_seed(9_000_000 + start)
        scenes, size = _linked(dataset.sample_scenes(seeds), dataset.optional, random)
        scenes = _sided(scenes, kind.sides, random) if kind.sides else scenes
        flip = torch.rand(len(scenes), generator=random) < kind.mirrored
        whole = torch.rand(len(scenes), generator=random) < 0.5
        parts = torch.where(whole, 1.0, crop + (1 - crop) * torch.rand(len(scenes), generator=random))
        where = torch.rand(len(scenes), 2, generator=random)
        pictures = torch.empty(len(scenes), 3, side, side)
        tops, lefts = torch.zeros(2, len(scenes))
        for s in SIZES:
            of_this_size = (size == s).nonzero().flatten()
            if not len(of_this_size):
                continue
            images = dataset.render(scenes[of_this_size.numpy()], s).images
            for row, image in zip(of_this_size.tolist(), images, strict=True):
                image = image.flip(-1) if flip[row] else image
                cut = max(4, round(float(parts[row]) * s))
                top, left = (int(w * (s - cut + 1)) for w in where[row])
                tops[row], lefts[row] = top / s, left / s
                patch = image[None, :, top : top + cut, left : left + cut]
                pictures[row] = functional.interpolate(patch, (side, side), mode="bilinear", antialias=True)[0]
        pictures = pictures.clamp(0, 1)
        controls = {"flip": flip.float(), "crop_top": tops, "crop_left": lefts}
        controls |= {"height": size.float(), "width": size.float(), "aspect": torch.ones(len(scenes))}
        latents.append(model.vae.encode(pictures * 2 - 1).latent_dist.mean * model.vae.config.scaling_factor)
        fraction = torch.rand(len(scenes), 1, generator=random)
        unsaid = (torch.rand(len(scenes), len(dataset.optional), generator=random) < fraction).numpy()
        texts.append(model.encode(dataset.caption(scenes, unsaid)))
        chunks.append(controls)
        progress(seeds.stop - first, count, None)
    return TransformerData(
        torch.cat(latents), torch.cat(texts), {name: torch.cat([c[name] for c in chunks]) for name in chunks[0]}
    )


def _linked(scenes: Scenes, optional: tuple[str, ...], random: torch.Generator) -> tuple[Scenes, torch.Tensor]:
    """Scenes with the attributes that captions may omit drawn anew, and (B,) original sizes that go with them.

    A Gaussian copula: every size and every value keeps its share; only the company they keep changes.
    """
    by_size = torch.randn(len(scenes), generator=random)
    cuts = torch.tensor(SHARES).cumsum(0)[:-1]
    size = torch.tensor(SIZES)[torch.searchsorted(cuts, torch.special.ndtr(by_size))]
    for name in optional:
        free = torch.randn(len(scenes), generator=random)
        rank = torch.special.ndtr(LINK * by_size + (1 - LINK**2) ** 0.5 * free)
        count = len(scenes.values[name])
        scenes = scenes.with_attributes(**{name: (rank * count).long().clamp(max=count - 1).numpy()})
    return scenes, size


def _sided(scenes: Scenes, share: float, random: torch.Generator) -> Scenes:
    new = {}
    for name, values in SIDED.items():
        codes = torch.tensor([ATTRIBUTES[name].index(v) for v in values])
        picked = torch.rand(len(scenes), generator=random) < share
        sides = codes[torch.randint(2, (len(scenes),), generator=random)]
        new[name] = torch.where(picked, sides, torch.from_numpy(scenes.column(name))).numpy()
    return scenes.with_attributes(**new)


def saved_data(
    path: str | Path,
    model: Portraits,
    count: int,
    side: int = 64,
    progress: Progress = silent,
    kind: Collection = AS_FOUND,
) -> TransformerData:
    """:func:`transformer_data` from a file in half precision, which is written first if there is none."""
    path = Path(path)
    if not path.is_file():
        data = transformer_data(model, count, side, progress=progress, kind=kind)
        tensors = {"latents": data.latents.half(), "text": data.text.half()}
        tensors |= {f"controls/{name}": value for name, value in data.controls.items()}
        save_safetensors(path, tensors)
    tensors = read_safetensors(path)[0]
    if tensors["latents"].shape != (count, 4, side // 4, side // 4):
        shape = tuple(tensors["latents"].shape)
        raise refuse("training pictures", shape, f"{count} of {side} px", "choose another folder")
    controls = {k.removeprefix("controls/"): v for k, v in tensors.items() if k.startswith("controls/")}
    return TransformerData(tensors["latents"], tensors["text"], controls)


def save_transformer(transformer: Any, folder: str | Path) -> None:
    """fp16 safetensors in diffusers' layout, whole or not at all."""
    import copy

    half = copy.deepcopy(transformer).to("cpu", torch.float16)
    half.register_to_config(_name_or_path="")  # a path of this machine does not belong in a shipped file
    write_folder(folder, lambda fresh: half.save_pretrained(str(fresh), safe_serialization=True))
