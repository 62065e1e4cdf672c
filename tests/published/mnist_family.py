"""A stranger's model as a family: Sofia Dominguez's DiffusionViT of digits (MIT), after docs/add_a_family.md.

Facts, read in her repository ``sofia-dominguezc/MNIST-diffusion`` at commit 88bc058:

- Pixels, 1 channel of 28 x 28, patches of 7 x 7; 16 image tokens, then 2 of the time and 2 of the class.
- Time: 1 - s. Returns x0; the velocity is (x_t - x0) / s. Classes 0 to 9, and 10 for no class.
- Four blocks with norms after attention and after the MLP; q, k and v are one weight, cut here into modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn
from vitrine.engine.families.family import Family, Inputs, Latent, Side, Tokens, square
from vitrine.engine.families.joint import JointBlock, joint_block
from vitrine.engine.network.condition import Condition
from vitrine.engine.network.site import AdaLN, Site

FILE = "MNIST-diffusion/parameters/MNIST/DiffusionViT.pth"
NO_CLASS, CLASSES, PATCH, WIDTH, HEADS, EXTRA = 10, 10, 7, 64, 4, 4
_SMALLEST = 1e-3


class Block(nn.Module):
    """Attention and MLP, each followed by its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.linear1, self.linear2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, 64)."""
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v))
        x = self.norm1(x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.linear2(F.gelu(self.linear1(x))))


class DigitTransformer(ModelMixin, ConfigMixin):
    """x0 of noisy digits (B, 1, 28, 28) at times (B,) of classes (B,)."""

    @register_to_config
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.unpatch = nn.ConvTranspose2d(WIDTH, 1, PATCH, PATCH)
        self.y_encoder = nn.Embedding(CLASSES + 1, 2 * WIDTH)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The clean picture; t is 0 at noise and 1 at the picture."""
        grid = self.patch_embed(x)
        angles = t[:, None] * torch.exp(-math.log(10000) / (WIDTH - 1) * torch.arange(WIDTH, device=t.device))
        time = torch.cat([angles.sin(), angles.cos()], 1).view(-1, 2, WIDTH)
        tokens = [grid.flatten(2).transpose(1, 2) + self.pos_embed, time, self.y_encoder(y).view(-1, 2, WIDTH)]
        states = torch.cat(tokens, 1)
        for block in self.blocks:
            states = block(states)
        return self.unpatch(states[:, :-EXTRA].transpose(1, 2).reshape_as(grid))


def from_state(state: Mapping[str, torch.Tensor]) -> DigitTransformer:
    """With names and weights as they are here."""
    renamed: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        name = key.replace("transformer.", "blocks.").replace("self_attn.out_proj", "to_out")
        if "in_proj" in name:
            stem, kind = name.split(".self_attn.in_proj_")
            renamed |= {f"{stem}.to_{x}.{kind}": part for x, part in zip("qkv", value.chunk(3), strict=True)}
        else:
            renamed[name] = value
    net = DigitTransformer()
    net.load_state_dict(renamed)
    return net.eval()


def sites(net: Any) -> Iterator[Site]:
    """Image tokens and the four others, of every block."""
    block = JointBlock(
        (("to_q", None), ("to_k", None), ("to_v", None)),
        ("", ""),
        "to_out",
        "linear2",
        "linear2",
        HEADS,
        "",
        lambda args, kwargs: None,
        norm="",
        adaln=lambda path: AdaLN(path),
    )
    for number in range(len(net.blocks)):
        yield from joint_block(f"vit-block{number}", f"blocks.{number}", block, PATCH)


def tokens(inputs: Inputs) -> Tokens:
    """Time and class follow the image."""
    x = inputs(0, "x")
    return Tokens(
        len(x), tuple(x.shape[-2:]), text=EXTRA, text_start=x.shape[-2] * x.shape[-1] // PATCH**2, image_start=0
    )


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """eps - x0 = (x_t - x0) / s."""
    s = (t / 1000).clamp_min(_SMALLEST)
    y = cond.extra["y"]
    return (x - net(x, 1 - s, y.expand(len(x)) if len(y) == 1 else y)) / s.view(-1, 1, 1, 1)


def digits(classes: list[int]) -> Condition:
    """The condition of a row of classes."""
    return Condition(extra={"y": torch.tensor(classes)})


FAMILY = Family(
    "MNIST digits",
    Side("DigitTransformer", sites, tokens),
    call=call,
    latent=Latent(channels=1, patch=PATCH),
    weights={},
    trained=square(28),
    time_input="1 - s",
    adapted=("to_q", "to_k", "to_v", "to_out", "linear1", "linear2"),
)
