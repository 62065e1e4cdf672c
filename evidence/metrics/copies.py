"""Is a picture a copy: the paper's four figures with any descriptor, SSCD and CLIP among them from local files.

Nothing is downloaded. Without files use the portraits' readout, or pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, interpolate, normalize

from ...engine.errors import refuse

Descriptor = Callable[[torch.Tensor], torch.Tensor]
"""(N, 3, H, W) in [0, 1] -> (N, D)."""
Agreement = Callable[[torch.Tensor, Sequence[str]], torch.Tensor]
"""(N, 3, H, W) in [0, 1] and N texts -> (N,)."""
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet


def load_sscd(path: str | Path, device: str = "cpu") -> Descriptor:
    """SSCD (Pizzi et al. 2022) from its TorchScript file, e.g. ``sscd_disc_mixup.torchscript.pt``.

    Pictures are resized to 320 x 320 without keeping their aspect, as NeMo's evaluation does.

    Raises:
        VitrineError: no such file, or no TorchScript.
    """
    if not Path(path).is_file():
        raise refuse("SSCD file", str(path), "a local .torchscript.pt file", "download it from SSCD's own page")
    try:
        net = torch.jit.load(str(path), map_location=device).eval()
    except RuntimeError as error:
        raise refuse("SSCD file", Path(path).name, "TorchScript", "take the .torchscript.pt") from error

    @torch.no_grad()
    def describe(images: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (_MEAN, _STD))
        x = interpolate(images.to(device).float(), (320, 320), mode="bilinear", antialias=True)
        return normalize(net((x - mean) / std).float(), dim=1)

    return describe


def load_clip(folder: str | Path, device: str = "cpu") -> Agreement:
    """Cosine of a picture and its prompt by a CLIP model in a local transformers folder (A_CLIP: ViT-B/32).

    Raises:
        VitrineError: no such folder.
    """
    if not (Path(folder) / "config.json").is_file():
        raise refuse("CLIP folder", str(folder), "a local transformers folder with config.json", "save CLIP there once")
    from transformers import CLIPModel, CLIPTokenizer

    net: Any = CLIPModel.from_pretrained(folder, local_files_only=True).eval().to(device)
    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    side = net.config.vision_config.image_size
    mean = torch.tensor((0.48145466, 0.4578275, 0.40821073), device=device).view(1, 3, 1, 1)
    std = torch.tensor((0.26862954, 0.26130258, 0.27577711), device=device).view(1, 3, 1, 1)

    @torch.no_grad()
    def agree(images: torch.Tensor, texts: Sequence[str]) -> torch.Tensor:
        x = interpolate(images.to(device).float(), (side, side), mode="bicubic", antialias=True).clamp(0, 1)
        ids = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt").to(device)
        out = net(input_ids=ids.input_ids, attention_mask=ids.attention_mask, pixel_values=(x - mean) / std)
        return cosine_similarity(out.image_embeds.float(), out.text_embeds.float())

    return agree


def copy_figures(
    samples: torch.Tensor,
    prompt: str,
    describe: Descriptor,
    *,
    untouched: torch.Tensor | None = None,
    original: torch.Tensor | None = None,
    agree: Agreement | None = None,
) -> dict[str, float]:
    """The figures of one prompt (NeMo, section 4.1): medians over its N samples.

    Args:
        samples: (N, 3, H, W) in [0, 1], blocked or not, with N >= 2.
        untouched: the same seeds without blocking, for ``similarity_gen``.
        original: (1, 3, H, W), the training picture, for ``similarity_orig``.

    Returns:
        ``diversity`` (mean cosine of all pairs; lower is more diverse) and what the inputs allow of
        ``similarity_orig``, ``similarity_gen``, ``agreement``.
    """
    if len(samples) < 2 or (untouched is not None and len(untouched) != len(samples)):
        given = (len(samples), None if untouched is None else len(untouched))
        raise refuse("samples", given, "two or more, as many untouched ones", "sample ten seeds, as the paper does")
    d = normalize(describe(samples), dim=1)
    pairs = torch.triu_indices(len(d), len(d), 1)
    found = {"diversity": float((d @ d.T)[pairs[0], pairs[1]].mean())}
    if original is not None:
        found["similarity_orig"] = float((d @ normalize(describe(original), dim=1).T).median())
    if untouched is not None:
        found["similarity_gen"] = float(cosine_similarity(d, describe(untouched)).median())
    if agree is not None:
        found["agreement"] = float(agree(samples, [prompt] * len(samples)).median())
    return found
