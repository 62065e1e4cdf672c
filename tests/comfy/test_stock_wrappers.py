"""ComfyUI's own nodes that change a MODEL, before one forward of ours outside a sampler: none ends in a raw error."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from vitrine_tests.lanes import nightly_but

PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"
ADDRESS = "up-level1-repeat0-vit-block0-cross-q"
STUDENT = {"student": "(the model is the student)", "preset": "manual", "timestep": 999.0, "noise": "unit"}
PLAIN = {"MODEL", "INT", "FLOAT", "BOOLEAN", "STRING", "COMBO"}
ON_A_RUN = (
    "APG", "CFGNorm", "CFGOverride", "CFGZeroStar", "ContextWindowsManual", "DifferentialDiffusion", "EasyCache",
    "Epsilon Scaling", "FreSca", "LazyCache", "Mahiro", "NAGuidance", "PerturbedAttentionGuidance", "RenormCFG",
    "RescaleCFG", "SelfAttentionGuidance", "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple", "SkipLayerGuidanceSD3",
    "TCFG", "TemporalScoreRescaling", "VideoLinearCFGGuidance", "VideoTriangleCFGGuidance",
)  # fmt: skip
"""Guidance, caches across steps, context windows: in one forward there is nothing for them to act on."""
ON_A_FORWARD = (
    "FreeU", "FreeU_V2", "HyperTile", "LoraLoaderBypassModelOnly", "LoraLoaderModelOnly", "ModelAttentionBackend",
    "ModelComputeDtype", "ModelSamplingAuraFlow", "ModelSamplingContinuousEDM", "ModelSamplingContinuousV",
    "ModelSamplingDiscrete", "ModelSamplingFlux", "ModelSamplingSD3", "ModelSamplingStableCascade",
    "MultiGPU_WorkUnits", "PatchModelAddDownscale", "ScaleROPE", "SelectModelDevice", "TomePatchModel",
    "UNetCrossAttentionMultiply", "UNetSelfAttentionMultiply", "UNetTemporalAttentionMultiply",
)  # fmt: skip
OURS = ("Look Inside (Activation Tap)", "EMD One-Step")
PAIRS = [(name, ours) for name in (*ON_A_RUN, *ON_A_FORWARD) for ours in OURS]
ELSEWHERE = {
    "other model families": (
        "ChromaRadianceOptions",
        "FluxKVCache",
        "HiDreamO1PatchSeamSmoothing",
        "LTXVContextWindows",
        "LTXVModalityGuidance",
        "LTXVSpatioTemporalGuidance",
        "MiniMaxH3SigmaShift",
        "ModelNoiseScale",
        "ModelSamplingLTXV",
        "WanAnimate2Cache",
        "WanContextWindowsManual",
        "wanBlockSwap",
    ),
    "wants a file that does not ship": ("HypernetworkLoader",),
    "compiles for minutes": ("TorchCompileModel",),
}


@pytest.fixture(scope="module")
def stock(comfy):
    """Node id -> class of core's nodes that take one MODEL and plain values, and return a MODEL."""
    comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
    return {k: v for k, v in comfy.nodes.NODE_CLASS_MAPPINGS.items() if not k.startswith("Vitrine") and _takes_model(v)}


def _takes_model(node):
    kinds = [value[0] for value in node.INPUT_TYPES().get("required", {}).values()]
    plain = all(isinstance(kind, list) or kind in PLAIN for kind in kinds)
    return plain and kinds.count("MODEL") == 1 and "MODEL" in node.RETURN_TYPES


def patched(node, model):
    """The node's MODEL, with its own defaults."""
    inputs = {}
    for key, (kind, *more) in node.INPUT_TYPES()["required"].items():
        options = more[0] if more else {}
        choices = kind if isinstance(kind, list) else options.get("options", [""])
        inputs[key] = model if kind == "MODEL" else options.get("default", choices[0])
    with torch.inference_mode():
        out = getattr(node(), node.FUNCTION)(**inputs)
    return (out.result if hasattr(out, "result") else out)[0]


@pytest.fixture(scope="module")
def own_lora(comfy):
    """A LoRA in the user's folder: the shipped ones are not in core's lists."""
    import folder_paths
    from vitrine.engine.portraits.shipped import student_file

    path = Path(folder_paths.get_folder_paths("loras")[0]) / "own.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(student_file(), path)
    yield
    path.unlink()


@pytest.fixture(scope="module")
def scene(comfy, own_lora):
    """A model, and the two nodes that run it once: MODEL -> what comes out."""
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    with torch.inference_mode():
        positive = clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))
    image = torch.rand(2, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    many = {"samples": torch.zeros(18, 4, 16, 16)}  # more rows than a context window has frames

    def tap(model):
        inputs = {"model": model, "vae": vae, "image": image, "positive": positive, "selection": "layers below"}
        settings = {"layers": ADDRESS, "timestep": 50.0, "seed": 0, "ensemble": 1, "dtype": "float32"}
        return comfy.call("VitrineActivationTap", **inputs, **settings)[0][ADDRESS].tensor

    def one_step(model):
        inputs = {"model": model, "positive": positive, "latent": many, "seed": 1}
        return comfy.call("VitrineEMDOneStepGenerator", **inputs, **STUDENT)[0]["samples"]

    return model, {"Look Inside (Activation Tap)": (tap, tap(model)), "EMD One-Step": (one_step, one_step(model))}


@pytest.mark.parametrize(("name", "ours"), nightly_but(PAIRS, PAIRS[::5]))
def test_a_stock_node_before_ours(stock, scene, name, ours):
    if name not in stock:
        pytest.skip("not in this ComfyUI")
    model, nodes = scene
    run, untouched = nodes[ours]
    result = run(patched(stock[name], model))
    assert result.shape == untouched.shape and bool(torch.isfinite(result).all())
    assert torch.equal(result, untouched) or name in ON_A_FORWARD


def test_nothing_stays_on_the_model(scene):
    model, nodes = scene
    assert all(torch.equal(run(model), untouched) for run, untouched in nodes.values())


def test_a_forward_leaves_no_cache_on_the_model(stock, scene):
    """EasyCache keeps a tensor for each prompt of a run; on the MODEL they would add up for ever."""
    model, nodes = scene
    cached = patched(stock["EasyCache"], model)
    for run, _ in nodes.values():
        run(cached)
    holder = cached.model_options["transformer_options"]["easycache"]
    assert not holder.uuid_cache_diffs and holder.x_prev_subsampled is None


def test_a_forward_is_told_what_core_tells_it(comfy, scene):
    """The options that the network gets in a sampler's step and in one forward of ours have the same keys."""
    import comfy.sample
    from vitrine.nodes.comfy.forwards import around_forwards

    model, nodes = scene
    seen = []

    @contextmanager
    def noted(forward):
        seen.append(forward.options)
        yield

    watched = around_forwards(model, "test", noted)
    latent = torch.zeros(2, 4, 16, 16)
    text = [[torch.zeros(1, 24, 64), {}]]
    with torch.inference_mode():
        comfy.sample.sample(watched, latent + 1, 1, 1.0, "euler", "normal", text, text, latent, disable_pbar=True)
    nodes["Look Inside (Activation Tap)"][0](watched)
    core, ours = seen[0], seen[-1]
    assert len(seen) == 2 and set(core) == set(ours)
    assert len(ours["uuids"]) == len(core["uuids"]) == 1 and ours["cond_or_uncond"] == core["cond_or_uncond"] == [0]
    assert ours["sigmas"].shape == core["sigmas"].shape and ours["sample_sigmas"].shape == core["sample_sigmas"].shape


def test_every_stock_node_has_its_place(stock):
    import comfyui_version

    if not comfyui_version.__version__.startswith("0.33."):
        pytest.skip("the lists above are those of ComfyUI 0.33")
    placed = {*ON_A_RUN, *ON_A_FORWARD, *(name for names in ELSEWHERE.values() for name in names)}
    assert set(stock) == placed
