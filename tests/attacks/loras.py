"""LoRA files that promise more than they hold, or what nobody can know: each is made small, none may cost much."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

Q = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
CONV = "lora_unet_mid_block_resnets_0_conv1"
BLOCK = "transformer_blocks.0.attn.to_q"


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def under(stem: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{stem}.{role}": value for role, value in tensors.items()}


def plain(stem: str = Q, rank: int = 2, out: int = 8, width: int = 8, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    both = {"lora_down.weight": ones(rank, width), "lora_up.weight": ones(out, rank)}
    return under(stem, **both, **more)


HUGE = {
    "LoKr of two 200 x 200": under(Q, lokr_w1=ones(200, 200), lokr_w2=ones(200, 200)),
    "LoKr of factors": under(Q, lokr_w1_a=ones(300, 1), lokr_w1_b=ones(1, 300), lokr_w2=ones(300, 300)),
    "LoKr with a wide kernel": under(CONV, lokr_w1=ones(20, 20), lokr_w2=ones(20, 20, 60, 60)),
    "LoKr of a transformer": under(BLOCK, lokr_w1=ones(200, 200), lokr_w2=ones(200, 200)),
    "LoCon with a middle factor": under(
        CONV,
        **{
            "lora_down.weight": ones(2, 3000, 1, 1),
            "lora_up.weight": ones(3000, 2, 1, 1),
            "lora_mid.weight": ones(2, 2, 50, 50),
        },
    ),
    "LoHa with cores": under(
        CONV,
        hada_w1_a=ones(1, 3000),
        hada_w1_b=ones(1, 3000),
        hada_w2_a=ones(1, 3000),
        hada_w2_b=ones(1, 3000),
        hada_t1=ones(1, 1, 90, 90),
        hada_t2=ones(1, 1, 3, 3),
    ),
    "LoHa of two ranks of one": under(
        Q, hada_w1_a=ones(20_000, 1), hada_w1_b=ones(1, 20_000), hada_w2_a=ones(20_000, 1), hada_w2_b=ones(1, 20_000)
    ),
    "LoHa of a transformer": under(
        BLOCK,
        hada_w1_a=ones(16_384, 64),
        hada_w1_b=ones(64, 16_384),
        hada_w2_a=ones(16_384, 300),
        hada_w2_b=ones(300, 16_384),
    ),
    "LoKr of a transformer, one layer's size": under(BLOCK, lokr_w1=ones(128, 128), lokr_w2=ones(150, 150)),
    "LoKr of many layers of a transformer": {
        key: value
        for n in range(40)
        for key, value in under(BLOCK.replace("0", str(n)), lokr_w1=ones(32, 32), lokr_w2=ones(64, 64)).items()
    },
    "LoRA of one factor": plain(rank=1, out=100_000, width=100_000),
    "LoRA of a transformer": plain(BLOCK.replace(".", "_"), 1, 100_000, 100_000),
}
"""Products larger than any layer, or than a file of that size can mean."""

WIDE = {
    "LoHa of a rank of 500": under(
        Q, hada_w1_a=ones(64, 500), hada_w1_b=ones(500, 64), hada_w2_a=ones(64, 500), hada_w2_b=ones(500, 64)
    ),
    "LoCon with a wide middle": under(
        CONV,
        **{
            "lora_down.weight": ones(1, 300, 1, 1),
            "lora_up.weight": ones(2, 3000, 1, 1),
            "lora_mid.weight": ones(3000, 1, 3, 3),
        },
    ),
    "LoCon of one middle row": under(
        CONV,
        **{
            "lora_down.weight": ones(20_000, 1, 1, 1),
            "lora_up.weight": ones(20_000, 1, 1, 1),
            "lora_mid.weight": ones(1, 20_000, 1, 1),
        },
    ),
    "LoKr with a long core": under(
        CONV, lokr_w1=ones(2, 2), lokr_w2_a=ones(9000, 2), lokr_w2_b=ones(1, 9000), lokr_t2=ones(9000, 1, 1, 1)
    ),
}
"""Products of a layer's size, whose factors are multiplied in an order that takes far more."""

SENSELESS = {
    "alpha 3e38": plain(alpha=torch.tensor(3e38)),
    "alpha NaN": plain(alpha=torch.tensor(float("nan"))),
    "alpha of two": plain(alpha=ones(2)),
    "alpha of none": plain(alpha=ones(0)),
    "NaN": {k: v * float("nan") for k, v in plain().items()},
    "3e38": {k: v * 3e38 for k, v in plain().items()},
    "1e30 twice": {k: v * 1e30 for k, v in plain().items()},
    "a diagonal": plain() | {f"{Q}.lora_diag": ones(2)},
    "a scalar": plain() | {f"{Q}.scalar": ones(1)},
    "a residual weight": plain() | {f"{Q}.weight": ones(8, 8)},
    "a difference too": plain() | {f"{Q}.diff": ones(8, 8)},
    "LoHa too": plain() | under(Q, hada_w1_a=ones(8, 1)),
    "singular values": plain(lora_E=ones(2, 1)),
    "a middle of another": plain(**{"lora_mid.weight": ones(3, 3, 3, 3)}),
    "rank 0": plain(rank=0),
    "two spellings": plain()
    | {"unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight": ones(2, 8)},
    "two adapters": {f"{BLOCK}.lora_{side}.{name}.weight": ones(2, 2) for side in "AB" for name in ("first", "second")},
    "LoKr of three sides": under(Q, lokr_w1=ones(2, 2, 2), lokr_w2=ones(2, 2)),
    "a core of another rank": under(
        CONV, lokr_w1=ones(2, 2), lokr_w2_a=ones(2, 2), lokr_w2_b=ones(2, 2), lokr_t2=ones(3, 2, 3, 3)
    ),
}
"""What no trainer writes, or what nobody knows how to read."""

PATTERNS = ("([a-z0-9_.]+)+!", "(a+)+$", r"(.*\.)*x", "to_[a-z]", "to_q?", r"\d+", "a{9}", "(a|(b|c))", "",
            "^", "(" * 400, "(?=a)", "a|b", "\\")  # fmt: skip

SETTINGS = {
    **{f"pattern {p[:20]}": {"alpha_pattern": {p: 1}} for p in PATTERNS},
    **{f"ranks {p[:20]}": {"rank_pattern": {p: 1}} for p in PATTERNS},
    "a list of patterns": {"alpha_pattern": ["to_q"]},
    "no table": {"rank_pattern": 7},
    "text": {"lora_alpha": "many"},
    "infinite": {"lora_alpha": float("inf")},
    "huge": {"alpha_pattern": {"to_q": 1e300}},
    "rank -1": {"r": -1},
    "rank NaN": {"r": float("nan")},
    "rank of text": {"r": "8"},
    "VeRA": {"peft_type": "VERA"},
    "kind 7": {"peft_type": 7},
    "PiSSA": {"init_lora_weights": "pissa_niter_4"},
    "OLoRA": {"init_lora_weights": "olora"},
    "KaSA": {"kasa_config": {"r": 1}},
    "a setting of tomorrow": {"use_tomorrow": True},
    "Conv1D": {"fan_in_fan_out": True},
    "AdaLoRA without its factors": {"peft_type": "ADALORA", "init_r": 4},
    "LoftQ": {"init_lora_weights": "loftq"},
}


def write(folder: Path, tensors: dict[str, torch.Tensor], settings: dict | None = None, header: bool = False) -> Path:
    """A LoRA file, with PEFT's settings in a file beside it or in its header as diffusers writes them."""
    metadata = (
        {"lora_adapter_metadata": json.dumps({f"unet.{k}": v for k, v in (settings or {}).items()})} if header else {}
    )
    if settings is not None and not header:
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    path = folder / "adapter_model.safetensors"
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, {"format": "pt", **metadata})
    return path
