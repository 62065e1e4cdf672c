"""The same address is the same tensor in diffusers and in ComfyUI: real modules of both, one set of random weights.

ComfyUI's modules are imported from its checkout; without one the file skips.
Weights travel through ComfyUI's own key maps, so the correspondence is theirs and only the addresses are ours.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    UNet2DConditionModel,
)
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.network.condition import Condition
from vitrine.engine.resolution.receptive import Spread, inner_convolutions
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture, edit
from vitrine_tests import models

# float32 on CPU, relative to the largest number. Measured: 0 for UNets, 7e-7 for PixArt. With ComfyUI's
# sub-quadratic attention (its choice on a CPU) sums run in another order, and UNets differ by up to 2.3e-6.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def comfy(comfyui):
    """ComfyUI's model classes, imported in this process."""
    sys.path.append(str(comfyui))
    try:
        import comfy.cli_args

        comfy.cli_args.args.cpu = not torch.cuda.is_available()
        # ComfyUI's own switch: both libraries then sum attention in one order, and what is left is the addressing.
        comfy.cli_args.args.use_pytorch_cross_attention = True
        import comfy.ldm.modules.diffusionmodules.openaimodel
        import comfy.ldm.pixart.pixartms
        import comfy.model_sampling
        import comfy.ops
        import comfy.utils
    finally:
        sys.path.remove(str(comfyui))
    ldm = comfy.ldm
    return SimpleNamespace(
        UNet=ldm.modules.diffusionmodules.openaimodel.UNetModel,
        PixArt=ldm.pixart.pixartms.PixArtMS,
        utils=comfy.utils,
        ops={"operations": comfy.ops.disable_weight_init},
        sampling=comfy.model_sampling,
    )


def carry_over(source, target, key_map):
    """Load a diffusers module's weights into its ComfyUI twin through ComfyUI's key map; every weight must be set."""
    found = {}
    for name, value in source.state_dict().items():
        where = key_map.get(name)
        if where is None:
            continue
        key, part, change = (where, None, None) if isinstance(where, str) else (*where, None)[:3]
        value = change(value) if change else value
        if part is None:
            found[key] = value
        else:
            found.setdefault(key, {})[part[1]] = value
    found = {k: torch.cat([v[i] for i in sorted(v)]) if isinstance(v, dict) else v for k, v in found.items()}
    missing, unexpected = target.load_state_dict(found, strict=False)
    assert not unexpected and set(missing) <= {"y_embedder.y_embedding"}
    return target.eval()


def shaken(model):
    """Norms, biases and gates away from the values they are built with, so that a swapped pair shows."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=g))
    return model.eval()


def drift(a, b):
    """Largest difference relative to the largest number."""
    return float((a - b).abs().max() / b.abs().max())


def compare(ours, theirs, run_ours, run_theirs):
    """Tap everything in both; returns address -> relative error. Names, shapes and grids must be the same."""
    assert set(sites_of(ours)) == set(sites_of(theirs))
    with torch.no_grad(), capture(ours, "*") as a, capture(theirs, "*") as b:
        run_ours(), run_theirs()
    assert set(a.activations) == set(b.activations) == set(sites_of(ours))
    for name, found in a.activations.items():
        assert found.grid == b[name].grid and found.tensor.shape == b[name].tensor.shape, name
    return {name: drift(b[name].tensor, found.tensor) for name, found in a.activations.items()}


# --- UNets: full-size address tables, then numbers at small width ---------------------------------------------------
UNETS = {
    "SD1.5": {"mult": (1, 2, 4, 4), "depth": (1, 1, 1, 0), "res": 2, "heads": 8, "context": 768, "channels": 320},
    "SD2.1": {"mult": (1, 2, 4, 4), "depth": (1, 1, 1, 0), "res": 2, "head_dim": 64, "context": 1024, "channels": 320},
    "SDXL": {
        "mult": (1, 2, 4), "depth": (0, 2, 10), "res": 2, "head_dim": 64, "context": 2048, "channels": 320, "adm": 2816,
    },
    "small SD1.5": {"mult": (1, 2, 2, 2), "depth": (1, 1, 1, 0), "res": 2, "heads": 2, "context": 24, "channels": 32},
    "small SD2.1": {"mult": (1, 2, 2), "depth": (1, 1, 0), "res": 2, "head_dim": 16, "context": 24, "channels": 32},
    "small SDXL": {
        "mult": (1, 2, 2), "depth": (0, 1, 3), "res": 2, "head_dim": 16, "context": 24, "channels": 32,
        "adm": 20 + 6 * 32,
    },
    "portraits shape": {"mult": (1, 3), "depth": (1, 1), "res": 1, "heads": 4, "context": 64, "channels": 32},
    "uneven": {"mult": (1, 2, 2), "depth": (1, 0, 2), "res": (1, 3, 1), "heads": 2, "context": 24, "channels": 32},
}  # fmt: skip
COUNTS = {"SD1.5": (197, 229), "SD2.1": (197, 229), "SDXL": (612, 752)}
SPREAD = {"SD1.5": 37, "SD2.1": 37, "SDXL": 26}
"""Convolutions that a larger receptive field spreads."""


def levels(plan):
    res = plan["res"]
    return res if isinstance(res, tuple) else (res,) * len(plan["mult"])


def diffusers_unet(plan):
    widths = tuple(plan["channels"] * m for m in plan["mult"])
    down = ["CrossAttnDownBlock2D" if d else "DownBlock2D" for d in plan["depth"]]
    up = ["CrossAttnUpBlock2D" if d else "UpBlock2D" for d in reversed(plan["depth"])]
    # In this class attention_head_dim means the number of heads, in every Stable Diffusion config.
    heads = plan["heads"] if "heads" in plan else tuple(w // plan["head_dim"] for w in widths)
    mid_depth = plan["depth"][-1] or 1
    config = {
        "block_out_channels": widths,
        "down_block_types": down,
        "up_block_types": up,
        "norm_num_groups": 32,
        "layers_per_block": levels(plan),
        "attention_head_dim": heads,
        "cross_attention_dim": plan["context"],
        "transformer_layers_per_block": [d or 1 for d in plan["depth"][:-1]] + [mid_depth],
        "use_linear_projection": "head_dim" in plan,
    }
    if "adm" in plan:
        added = 256 if plan["channels"] == 320 else 32
        config |= {"addition_embed_type": "text_time", "addition_time_embed_dim": added}
        config |= {"projection_class_embeddings_input_dim": plan["adm"]}
    return UNet2DConditionModel(**config)


def comfy_config(plan):
    pairs = list(zip(plan["depth"], levels(plan), strict=True))
    return {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": plan["channels"],
        "channel_mult": plan["mult"],
        "num_res_blocks": list(levels(plan)),
        "use_spatial_transformer": True,
        "transformer_depth": [d for d, n in pairs for _ in range(n)],
        "transformer_depth_output": [d for d, n in pairs for _ in range(n + 1)],
        "transformer_depth_middle": plan["depth"][-1] or 1,
        "context_dim": plan["context"],
        "legacy": False,
        "num_heads": plan.get("heads", -1),
        "num_head_channels": plan.get("head_dim", -1),
        "use_linear_in_transformer": "head_dim" in plan,
        "num_classes": "sequential" if "adm" in plan else None,
        "adm_in_channels": plan.get("adm"),
    }


def unet_twins(comfy, name):
    torch.manual_seed(0)
    plan = UNETS[name]
    ours = shaken(diffusers_unet(plan))
    config = comfy_config(plan)
    theirs = comfy.UNet(**config, **comfy.ops)
    return ours, carry_over(ours, theirs, unet_key_map(comfy, ours, theirs, config))


def unet_key_map(comfy, ours, theirs, config):
    """ComfyUI's map; where levels differ in res blocks, which it miscounts, ours for containers and theirs inside."""
    most = max(config["num_res_blocks"])
    if min(config["num_res_blocks"]) == most:
        return comfy.utils.unet_to_diffusers(config)
    depth = config["transformer_depth"][0], 0, config["transformer_depth"][-1]
    even = {"num_res_blocks": [most] * 3, "transformer_depth": [d for d in depth for _ in range(most)]}
    even |= {"transformer_depth_output": [d for d in depth for _ in range(most + 1)]}
    full = comfy.utils.unet_to_diffusers(config | even)
    here, there = sites_of(ours), sites_of(theirs)
    place = {here[n].path: there[n].path for n in here if n.endswith(("res-out", "vit-out", "sampler-out"))}
    fixed = {}
    for key, value in full.items():
        container = next((p for p in place if key.startswith(p + ".") and not p.startswith("mid")), None)
        fixed[key] = f"{place[container]}.{value.split('.', 3)[3]}" if container else value
    return fixed


def unet_runs(ours, theirs, plan, h, w, batch=2):
    g = torch.Generator().manual_seed(1)
    x, text = torch.randn(batch, 4, h, w, generator=g), torch.randn(batch, 7, plan["context"], generator=g)
    t, added, y = torch.full((batch,), 51.0), None, None
    if "adm" in plan:
        pooled, ids = torch.randn(batch, 20, generator=g), torch.tensor([[256.0, 256, 0, 0, 256, 256]] * batch)
        added = {"text_embeds": pooled, "time_ids": ids}
        y = torch.cat([pooled, ours.add_time_proj(ids.flatten()).view(batch, -1)], 1)

    def run_ours():
        return ours(x, t, encoder_hidden_states=text, added_cond_kwargs=added).sample

    def run_theirs():
        return theirs(x, t, context=text, y=y, transformer_options={})

    return run_ours, run_theirs


@pytest.mark.parametrize("name", list(COUNTS))
def test_full_size_unets_have_the_same_addresses_in_both_layouts(comfy, name):
    plan, (shown, with_text) = UNETS[name], COUNTS[name]
    with torch.device("meta"):
        ours, theirs = diffusers_unet(plan), comfy.UNet(**comfy_config(plan), **comfy.ops)
    for net in (ours, theirs):
        sites = sites_of(net)
        for site in sites.values():
            for path in filter(None, (getattr(site, name, None) for name in ("path", "query", "key", "grid"))):
                net.get_submodule(path)
        gdf = [n for n in sites if not n.endswith(("-self-out", "-cross-out", "-ffn-out"))]
        assert len(gdf) == with_text
        assert sum(not n.endswith(("-cross-k", "-cross-v")) for n in gdf) == shown
    assert list(sites_of(ours)) == list(sites_of(theirs))
    shapes = [sorted(tuple(n.get_submodule(p).weight.shape) for p in inner_convolutions(n)) for n in (ours, theirs)]
    assert shapes[0] == shapes[1] and len(shapes[0]) == SPREAD[name]


@pytest.mark.parametrize("name", ["small SD1.5", "small SD2.1", "small SDXL", "portraits shape", "uneven"])
def test_unet_tensors_agree(comfy, name, record_property):
    ours, theirs = unet_twins(comfy, name)
    errors = compare(ours, theirs, *unet_runs(ours, theirs, UNETS[name], 16, 40))
    worst = max(errors, key=errors.get)
    record_property("worst", f"{worst} {errors[worst]:.1e} of {len(errors)}")
    assert errors[worst] < TOLERANCE, (worst, errors[worst])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["small SD1.5", "small SD2.1", "small SDXL", "portraits shape", "uneven"])
def test_spread_unets_agree(comfy, name, record_property):
    """Both libraries' UNets with their inner convolutions spread, by another step on each axis."""
    ours, theirs = unet_twins(comfy, name)
    run_ours, run_theirs = unet_runs(ours, theirs, UNETS[name], 48, 32)
    with torch.no_grad():
        before = run_ours(), run_theirs()
        with Spread(ours, (3, 2)), Spread(theirs, (3, 2)):
            wide = run_ours(), run_theirs()
        again = run_ours(), run_theirs()
    record_property("drift", f"{drift(wide[1], wide[0]):.1e}")
    assert drift(wide[1], wide[0]) < TOLERANCE and drift(wide[0], before[0]) > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True)), "and nothing of it stays"


# --- transformers -------------------------------------------------------------------------------------------------
def pixart_twins(comfy):
    ours = models.pixart(attention_head_dim=16, num_layers=3, sample_size=64, cross_attention_dim=32)
    config = {"hidden_size": 32, "num_heads": 2, "depth": 3, "caption_channels": 24}
    theirs = comfy.PixArt(**config, model_max_length=7, micro_condition=False, **comfy.ops)
    return carry_over(shaken(ours), theirs, comfy.utils.pixart_to_diffusers(config)), ours, (48, 80)


@pytest.mark.parametrize("name", ["PixArt"])
def test_transformer_tensors_agree(comfy, name, record_property):
    """PixArt alone: the other transformers have a file in ``tests/families``, which test_family_twins compares."""
    torch.manual_seed(0)
    theirs, ours, size = pixart_twins(comfy)
    g = torch.Generator().manual_seed(1)
    x, text = torch.randn(2, 4, *size, generator=g), torch.randn(2, 7, 24, generator=g)
    denoiser = Denoiser.from_diffusers(ours, DDIMScheduler())
    runs = (
        lambda: denoiser.forward(x, 50, Condition(text)),
        lambda: theirs(x, torch.full((2,), 50.0), context=text, transformer_options={}),
    )
    errors = compare(ours, theirs, *runs)
    worst = max(errors, key=errors.get)
    record_property("worst", f"{worst} {errors[worst]:.1e} of {len(errors)}")
    assert errors[worst] < TOLERANCE, (worst, errors[worst])
    rows, place = torch.tensor([False, True]), "vit-block1-cross-v"
    with torch.no_grad():
        plain = [run() for run in runs]
        with edit(ours, {place: lambda v: v * 0}, rows=rows), edit(theirs, {place: lambda v: v * 0}, rows=rows):
            changed = [run() for run in runs]
    assert drift(changed[1], changed[0]) < TOLERANCE
    for old, new in zip(plain, changed, strict=True):
        assert torch.equal(old[0], new[0]) and not torch.allclose(old[1], new[1])


def test_schedules_agree_with_comfyuis_sigma_table(comfy):
    sampling = comfy.sampling.ModelSamplingDiscrete()
    ours = NoiseSchedule.scaled_linear()
    t = torch.arange(1000)
    assert torch.allclose(sampling.sigmas.double(), ours.sigma(t), rtol=1e-5)
    assert torch.allclose(sampling.timestep(sampling.sigmas[50]).double(), ours.timestep(ours.sigma(50)), atol=1e-6)
    some = torch.tensor([0.5, 50.25, 700.75])
    assert torch.allclose(sampling.sigma(some).double(), ours.sigma(some), rtol=1e-5)
