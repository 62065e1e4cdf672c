"""LoRA files as people have them, made by the public writers, and what becomes of each: docs/wild-loras.md's table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline
from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya
from peft.tuners.lora.config import KasaConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from vitrine_tests import models

BOTH = ["to_q", "conv1", "proj_in"]
TARGETS = ["to_q", "to_v", "proj_in"]
NAME = "pytorch_lora_weights.safetensors"
Truth = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Wild:
    """One kind of file.

    Attributes:
        writer, file: who writes it, and what it is, as the docs say it.
        make: writes it into a folder; gives its path and, if it can be read, the true changes of the weights.
        outcome: ``read``, or a word of the reason why not; after ``read, says`` a word of the remark; ``read with base
            weights`` from those of the network, which is :func:`tiny`, and refused without.
    """

    writer: str
    file: str
    make: Callable[[Path], tuple[Path, Truth]]
    outcome: str


def tiny():
    """A UNet whose proj_in is a convolution, as in SD1.5."""
    return models.unet(sample_size=8, block_out_channels=(32, 64), attention_head_dim=8)


def adapted(config, network=None, seed=0):
    """A network with a PEFT adapter of random weights."""
    model = peft.get_peft_model(network or tiny(), config)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=random)
            assert "lora" in name or not isinstance(config, peft.LoraConfig)
    return model


def truth(model) -> Truth:
    """PEFT's own changes of the weights."""
    layers = {n: m for n, m in model.base_model.model.named_modules() if hasattr(m, "get_delta_weight")}
    return {name: layer.get_delta_weight("default").detach() for name, layer in layers.items()}


def merged(model) -> Truth:
    """What PEFT's own merge does to the weights."""
    layers = {n: m for n, m in model.base_model.model.named_modules() if hasattr(m, "merge")}
    before = {n: m.get_base_layer().weight.detach().clone() for n, m in layers.items()}
    model.merge_adapter()
    return {n: m.get_base_layer().weight.detach() - before[n] for n, m in layers.items()}


def by_peft(config, dtype=torch.float32, network=None):
    """``save_pretrained``, in a folder as PEFT makes it."""

    def make(folder: Path):
        model = adapted(config, network() if network else None)
        model.save_pretrained(folder)
        path = folder / "adapter_model.safetensors"
        if dtype != torch.float32:
            save_file({k: v.to(dtype) for k, v in load_file(path).items()}, path)
        return path, merged(model) if getattr(config, "use_dora", False) else truth(model)

    return make


def by_lycoris(config, drop: tuple[str, ...] = ()):
    """PEFT's tensors under LyCORIS's names, with its alphas; both keep LoHa and LoKr alike."""

    def make(folder: Path):
        model = adapted(config)
        out = {}
        for key, value in bare(model).items():
            path, role = key.rsplit(".", 1)
            path, role = (
                (path.rsplit(".", 1)[0], f"{path.rsplit('.', 1)[1]}.{role}") if role == "weight" else (path, role)
            )
            role = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}.get(role, role)
            stem = f"lora_unet_{path.replace('.', '_')}"
            if role == "lora_magnitude_vector":
                value, role = value.reshape(-1, *[1] * (1 if value.ndim == 1 else 3)), "dora_scale"
            out |= {f"{stem}.{role}": value.contiguous(), f"{stem}.alpha": torch.tensor(8.0)}
        save_file(out, folder / "lycoris.safetensors")
        return folder / "lycoris.safetensors", merged(model) if getattr(config, "use_dora", False) else truth(model)

    return make


def with_middle(folder: Path):
    """LyCORIS's LoCon of a convolution with a middle factor; what its three convolutions do together is the change."""
    random = torch.Generator().manual_seed(0)
    up, mid, down = (torch.randn(s, generator=random) for s in ((32, 4, 1, 1), (4, 4, 3, 3), (4, 32, 1, 1)))
    stem = "lora_unet_down_blocks_0_resnets_0_conv1"
    tensors = {"lora_up.weight": up, "lora_mid.weight": mid, "lora_down.weight": down, "alpha": torch.tensor(2.0)}
    save_file({f"{stem}.{k}": v for k, v in tensors.items()}, folder / "mid.safetensors")
    point = torch.zeros(32, 32, 5, 5)
    point[range(32), range(32), 2, 2] = 1
    for kernel in (down, mid, up):
        point = torch.nn.functional.conv2d(point, kernel, padding=kernel.shape[-1] // 2)
    change = point.transpose(0, 1).flip(2, 3)[:, :, 1:4, 1:4] * 2 / 4  # a convolution mirrors its kernel
    return folder / "mid.safetensors", {"down_blocks.0.resnets.0.conv1": change}


def full_difference(folder: Path):
    """LyCORIS's full: the difference of two networks' weights, norm layers too."""
    stems = {"conv_in": (32, 4, 3, 3), "mid_block.attentions.0.proj_in": (64, 64, 1, 1)}
    stems["mid_block.attentions.0.transformer_blocks.0.attn1.to_q"] = (64, 64)
    random = torch.Generator().manual_seed(0)
    true = {path: torch.randn(shape, generator=random) for path, shape in stems.items()}
    out = {f"lora_unet_{path.replace('.', '_')}.diff": change for path, change in true.items()}
    save_file(out | {"lora_unet_conv_norm_out.diff": torch.ones(32)}, folder / "full.safetensors")
    return folder / "full.safetensors", true


def lora(**settings):
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS} | settings)


def by_diffusers(metadata: bool, text: bool = False):
    """``save_lora_weights``; only with metadata does the file know its alpha."""

    def make(folder: Path):
        model = adapted(lora())
        true, extra = truth(model), {}
        if metadata:
            extra["unet_lora_adapter_metadata"] = json.loads(json.dumps(lora().to_dict(), default=list))
        else:
            true = {k: v / 2 for k, v in true.items()}  # as diffusers loads it: scale 1, not 8 / 4
        if text:
            encoder = adapted(lora(target_modules=["q_proj"]), models.text_encoder())
            extra["text_encoder_lora_layers"] = bare(encoder)
        StableDiffusionPipeline.save_lora_weights(folder, bare(model), **extra)
        return folder / NAME, true

    return make


def bare(model) -> Truth:
    """PEFT's tensors as diffusers' training scripts hand them over."""
    return {k.removeprefix("base_model.model."): v for k, v in get_peft_model_state_dict(model).items()}


def by_kohya(folder: Path):
    """diffusers' converter to kohya names, as its training scripts use it."""
    model = adapted(lora())
    state = {f"unet.{k}": v for k, v in bare(model).items()}
    named = convert_state_dict_to_kohya(state)
    # the converter writes alpha = rank; kohya's trainer writes what it trained with
    save_file({k: torch.tensor(8.0) if k.endswith(".alpha") else v for k, v in named.items()}, folder / "k.safetensors")
    return folder / "k.safetensors", truth(model)


def by_flux(folder: Path):
    """FluxPipeline's ``save_lora_weights``."""
    model = adapted(lora(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]), models.flux())
    FluxPipeline.save_lora_weights(folder, bare(model))
    return folder / NAME, truth(model)


def renamed(prefix: str, down: str, up: str, extra: Callable[[], Truth] = dict, network=tiny):
    """The same tensors under another program's names."""

    def make(folder: Path):
        model = adapted(lora(), network())
        out = dict(extra())
        for key, value in bare(model).items():
            path, role = key.rsplit(".lora_", 1)
            stem = prefix + (path.replace(".", "_") if prefix.endswith("_") else path)
            out[f"{stem}.{down if role[0] == 'A' else up}.weight"] = value
            out[f"{stem}.alpha"] = torch.tensor(8.0)
        save_file(out, folder / "named.safetensors")
        return folder / "named.safetensors", truth(model)

    return make


def only(tensors: Callable[[], Truth], name: str = "only.safetensors"):
    """A file that is no LoRA of ours."""

    def make(folder: Path):
        save_file({k: v.contiguous() for k, v in tensors().items()}, folder / name)
        return folder / name, {}

    return make


def old_diffusers(folder: Path):
    """The attention processors of diffusers before 0.22."""
    model = adapted(lora(target_modules=["to_q", "to_v"]))
    state = {}
    for key, value in bare(model).items():
        head, tail = key.rsplit(".lora_", 1)
        stem, leaf = head.rsplit(".", 1)
        state[f"unet.{stem}.processor.{leaf}_lora.{'down' if tail[0] == 'A' else 'up'}.weight"] = value
    save_file(state, folder / NAME)
    return folder / NAME, {k: v / 2 for k, v in truth(model).items()}


def pickled(folder: Path):
    torch.save(bare(adapted(lora())), folder / "old.pt")
    return folder / "old.pt", {}


def cut(folder: Path):
    path, _ = by_kohya(folder)
    path.write_bytes(path.read_bytes()[:-50])
    return path, {}


def clip(prefix: str) -> Truth:
    names = (("down", (2, 8)), ("up", (8, 2)))
    stem = f"{prefix}transformer.text_model.encoder.layers.0.self_attn.q_proj"
    return {f"{stem}.lora_{role}.weight": torch.ones(shape) for role, shape in names}


KOHYA = ("lora_unet_", "lora_down", "lora_up")
FP8 = torch.float8_e4m3fn
PATTERNS = {"rank_pattern": {r"attn1\.to_(q|v)": 2}, "alpha_pattern": {r"attn[12]\.to_q": 16, "proj_in": 2}}

CASES = (
    Wild("PEFT", "LoRA of projections, 1 x 1 convolutions too", by_peft(lora()), "read"),
    Wild("PEFT", "LoRA of 3 x 3 convolutions (LoCon)", by_peft(lora(target_modules=["conv1", "to_k"])), "read"),
    Wild("PEFT", "rank-stabilised (rsLoRA)", by_peft(lora(use_rslora=True)), "read"),
    Wild("PEFT", "rank and alpha by pattern, with alternatives", by_peft(lora(**PATTERNS)), "read"),
    Wild("PEFT", "half precision", by_peft(lora(), torch.bfloat16), "read"),
    Wild("PEFT", "8-bit floats", by_peft(lora(), FP8), "read"),
    Wild("PEFT", "biases of factors", by_peft(lora(lora_bias=True, target_modules=["to_q"])), "read, says lora_B.bias"),
    Wild("PEFT", "AdaLoRA", by_peft(peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, lora_alpha=3, target_modules=["to_q"])), "read"),
    Wild("PEFT", "PiSSA, OLoRA, CorDA, LoftQ: they change the base weights", by_peft(
        lora(init_lora_weights="pissa", target_modules=["to_q"])),
         "init_lora_weights"),
    Wild("PEFT", "KaSA", by_peft(lora(kasa_config=KasaConfig(), target_modules=["to_q"])), "KaSA"),
    Wild("PEFT", "two adapters in one file", only(lambda: {
        f"unet.mid_block.attentions.0.proj_in.lora_{side}.{name}.weight": torch.ones(2, 2)
        for side in "AB" for name in ("first", "second")}), "twice"),
    Wild("PEFT", "around a wrapped model, `unet.base_model.model...`", renamed(
        "unet.base_model.model.", "lora_A", "lora_B"), "read"),
    Wild("PEFT", "DoRA", by_peft(lora(use_dora=True, target_modules=BOTH)),
         "read with base weights, else left out: DoRA"),
    Wild("PEFT", "LoHa", by_peft(peft.LoHaConfig(r=2, alpha=4, target_modules=BOTH)), "read"),
    Wild("PEFT", "LoHa of 3 x 3 convolutions with a core", by_peft(
        peft.LoHaConfig(r=2, target_modules=BOTH, use_effective_conv2d=True)), "read"),
    Wild("PEFT", "LoHa of high rank: a full difference", by_peft(
        peft.LoHaConfig(r=8, target_modules=["to_q"])), "read"),
    Wild("PEFT", "LoKr", by_peft(peft.LoKrConfig(r=2, alpha=3, target_modules=BOTH)), "read"),
    Wild("PEFT", "LoKr, both sides in factors, convolutions with a core", by_peft(peft.LoKrConfig(
        r=2, target_modules=BOTH, decompose_both=True, decompose_factor=4, use_effective_conv2d=True)), "read"),
    Wild("PEFT", "LoKr of whole factors: a full difference", by_peft(
        peft.LoKrConfig(r=64, alpha=32, target_modules=["to_q"])), "read"),
    Wild("PEFT", "OFT", by_peft(peft.OFTConfig(r=0, oft_block_size=8, target_modules=["to_q"])), "OFT"),
    Wild("PEFT", "a text encoder's LoRA", by_peft(lora(target_modules=["q_proj"]), network=models.text_encoder),
         "text encoder layers"),
    Wild("diffusers", "with its settings in the header", by_diffusers(True), "read"),
    Wild("diffusers", "without settings: scale 1, as diffusers loads it", by_diffusers(False), "read"),
    Wild("diffusers", "UNet and text encoder", by_diffusers(True, text=True), "read, says text encoders"),
    Wild("diffusers", "attention processors, before 0.22", old_diffusers, "read"),
    Wild("diffusers", "Flux", by_flux, "read"),
    Wild("kohya, by diffusers' converter", "`lora_unet_...`", by_kohya, "read"),
    Wild("kohya", "with `lora_te1_...`", renamed(*KOHYA, lambda: {
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(2, 8),
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": torch.ones(8, 2)}), "read, says text encoders"),
    Wild("kohya", "with new tokens, `bundle_emb...`", renamed(*KOHYA, lambda: {
        "bundle_emb.ohwx.string_to_param.*": torch.ones(2, 8)}), "read, says bundle_emb"),
    Wild("LyCORIS", "LoCon with norm layers, `w_norm`", renamed(*KOHYA, lambda: {
        "lora_unet_conv_norm_out.w_norm": torch.ones(32), "lora_unet_conv_norm_out.b_norm": torch.ones(32)}),
        "read, says w_norm"),
    Wild("LyCORIS", "GLoRA", only(lambda: {
        f"lora_unet_x.{k}.weight": torch.ones(2, 2) for k in ("a1", "a2", "b1", "b2")}), "GLoRA"),
    Wild("LyCORIS", "LoHa", by_lycoris(peft.LoHaConfig(r=2, alpha=8, target_modules=BOTH)), "read"),
    Wild("LyCORIS", "LoKr", by_lycoris(peft.LoKrConfig(
        r=2, alpha=8, target_modules=BOTH, use_effective_conv2d=True)), "read"),
    Wild("LyCORIS", "DoRA, `dora_scale` by output", by_lycoris(lora(use_dora=True, target_modules=BOTH)),
         "read with base weights, else left out: DoRA"),
    Wild("LyCORIS", "LoCon with a middle factor, `lora_mid`", with_middle, "read"),
    Wild("LyCORIS", "full difference", full_difference, "read, says norm layers"),
    Wild("OneTrainer", "Flux, `lora_transformer_...`", renamed(
        "lora_transformer_", "lora_down", "lora_up", network=models.flux), "read"),
    Wild("ComfyUI", "`diffusion_model...`", renamed("diffusion_model.", "lora_down", "lora_up"), "read"),
    Wild("ComfyUI", "`model.diffusion_model...`", renamed("model.diffusion_model.", "lora_down", "lora_up"), "read"),
    Wild("ComfyUI", "with `text_encoders.clip_l...`", renamed(
        "diffusion_model.", "lora_down", "lora_up", lambda: clip("text_encoders.clip_l.")), "read, says text encoders"),
    Wild("ComfyUI", "with bare `clip_l...`", renamed(
        "diffusion_model.", "lora_down", "lora_up", lambda: clip("clip_l.")), "read, says text encoders"),
    Wild("weights2weights", "`.lora_A.identity1.weight`, which PEFT ignores", renamed(
        "base_model.model.", "lora_A.identity1", "lora_B.identity1"), "read"),
    Wild("XLabs", "Flux, fused queries, keys and values", only(lambda: {
        f"double_blocks.0.processor.qkv_lora1.{k}.weight": torch.ones(2, 2) for k in ("down", "up")}), "XLabs"),
    Wild("any", "a whole checkpoint", only(lambda: {
        f"model.diffusion_model.{k}": v for k, v in tiny().state_dict().items()}), "a whole model"),
    Wild("any", "a pickle (`.pt`, `.bin`, `.ckpt`)", pickled, "pickles are not read"),
    Wild("any", "cut short by a download", cut, "download it again"),
)  # fmt: skip
