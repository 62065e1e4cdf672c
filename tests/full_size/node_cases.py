"""Each node once on a full-size checkpoint in real ComfyUI: ``CASES`` holds a run of every node of the pack by its id.

A run returns tensors; what it needs of other nodes comes from :class:`Scene`, where each is run once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vitrine.engine.errors import VitrineError
from vitrine_tests.full_size.material import pictures
from vitrine_tests.full_size.scene import CAPTIONS, PROMPT, STUDENT, Scene

Tensors = list[torch.Tensor]
CASES: dict[str, Callable[[Scene], Tensors]] = {}
NO_MODEL = ("VitrineRenderPortrait", "VitrineCrossSizeConsistency", "VitrineEMDVariety", "VitrineNEMOCompareCopies")
LEFT_OUT = dict.fromkeys(NO_MODEL, "needs no model") | {
    "VitrineLoadPortraits": "loads another model",
    "VitrineLoadPortraitsTransformer": "loads another model",
    "VitrineTrainW2WSlider": "trains as VitrineW2WInvert does",
    "VitrineEMDDistill": "reads a diffusers folder, in the notes",
}
"""Node id -> why it has no case."""


def case(node_id: str) -> Callable:
    """Keeps a run under the node's id."""

    def keep(run: Callable[[Scene], Tensors]) -> Callable[[Scene], Tensors]:
        CASES[node_id] = run
        return run

    return keep


# --- activations --------------------------------------------------------------------------------------------------
def _all(activations: Any) -> Tensors:
    return [activations[a].tensor for a in activations]


@case("VitrineActivationTap")
def activation_tap(s: Scene) -> Tensors:
    taps, picture, _ = s.taps
    return [*_all(taps), picture]


@case("VitrineWordMap")
def word_map(s: Scene) -> Tensors:
    own = {"model": s.model, "clip": s.clip, "vae": s.vae, "positive": s.positive, "prompt": PROMPT, "word": "face"}
    return list(s.call("VitrineWordMap", image=pictures(1, 2 * SMALL)[0], **own))


@case("VitrineTapDuringSampling")
def tap_during_sampling(s: Scene) -> Tensors:
    found = s.sampled_while_recording["samples"]
    assert torch.equal(found, s.sampled(s.model)["samples"]), "watching changes nothing"
    return [found]


@case("VitrineCollectTaps")
def collect_taps(s: Scene) -> Tensors:
    taps, picture, _ = s.call("VitrineCollectTaps", recorder=s.recorded[1], latent=s.sampled_while_recording)
    return [*_all(taps), picture]


@case("VitrineActivationPicture")
def activation_picture(s: Scene) -> Tensors:
    return [s.call("VitrineActivationPicture", activations=s.taps[0])[0]]


@case("VitrineSaveActivations")
def save_activations(s: Scene) -> Tensors:
    assert Path(s.call("VitrineSaveActivations", activations=s.taps[0], name=f"full-{s.family}")[0]).is_file()
    return _all(s.taps[0])


@case("VitrineLoadActivations")
def load_activations(s: Scene) -> Tensors:
    kept = save_activations(s)
    loaded = _all(s.call("VitrineLoadActivations", file=f"full-{s.family}.safetensors")[0])
    assert all(torch.equal(a, b) for a, b in zip(kept, loaded, strict=True))
    return loaded


@case("VitrineFindCorrespondence")
def find_correspondence(s: Scene) -> Tensors:
    told = {"source": s.images[:1], "target": s.images[1:2], "positive": s.positive}
    points, picture = s.call("VitrineFindCorrespondence", model=s.model, vae=s.vae, **told)
    assert points.strip()
    return [picture]


@case("VitrineSegmentLikeThis")
def segment_like_this(s: Scene) -> Tensors:
    told = {"examples": s.images[:2], "masks": s.masks[:2], "images": s.images[2:], "positive": s.positive}
    return list(s.call("VitrineSegmentLikeThis", model=s.model, vae=s.vae, **told))


@case("VitrineRankActivations")
def rank_activations(s: Scene) -> Tensors:
    _, addresses, report, kept, _ = s.ranking
    assert addresses and "vit-block0" in report
    return [kept]


@case("VitrineSaveFeaturePreset")
def save_preset(s: Scene) -> Tensors:
    assert Path(s.call("VitrineSaveFeaturePreset", preset=s.ranking[0], name=f"full-{s.family}")[0]).is_file()
    return []


@case("VitrineLoadFeaturePreset")
def load_preset(s: Scene) -> Tensors:
    save_preset(s)
    assert s.call("VitrineLoadFeaturePreset", file=f"full-{s.family}.json", model=s.model)[1] == s.ranking[1]
    return []


# --- NEMO ---------------------------------------------------------------------------------------------------------
SMALL = 96
"""Side in pixels of what takes many forwards; NEMO compares latents of 11 cells or more."""


def _probe(s: Scene) -> dict:
    return {"model": s.model, "seeds": 2, "latent": s.latent(side=SMALL)}


def _sampled(s: Scene) -> dict:
    return {"model": s.model, "latent": s.latent(side=SMALL), "samples": 2, "steps": 2, "cfg": 3.0, "first_seed": 1}


@case("VitrineNEMOCalibrate")
def nemo_calibrate(s: Scene) -> Tensors:
    made, tau, _ = s.call("VitrineNEMOCalibrate", clip=s.clip, prompts=CAPTIONS, **_sampled(s), seeds=2)
    return [*made.statistics.means.values(), made.samples.places, torch.tensor(tau)]


@case("VitrineNEMODetect")
def nemo_detect(s: Scene) -> Tensors:
    told = {"positive": s.positive, "negative": s.negative, "vae": s.vae}
    _, distance, report, samples, _ = s.call("VitrineNEMODetect", **told, **_sampled(s))
    assert "no verdict" in report
    score, pictures = s.call("VitrineNEMODetect", **told, **_probe(s), method="one step")[1:4:2]
    return [torch.tensor(distance), samples, torch.tensor(score), pictures]


@case("VitrineNEMOFindNeurons")
def nemo_find(s: Scene) -> Tensors:
    """By four seeds, of which random weights make two agree by more than this tau."""
    told = {"calibration": s.calibration, "effect_fraction": 0.9801, "mode": "fast"}
    neurons, report, picture = s.call("VitrineNEMOFindNeurons", positive=s.positive, **_probe(s) | told | {"seeds": 4})
    assert len(neurons) and "after" in report
    return [picture]


@case("VitrineNEMONeuronBlocker")
def nemo_block(s: Scene) -> Tensors:
    model = s.call("VitrineNEMONeuronBlocker", model=s.model, neurons=s.neurons)[0]
    return _changed(s, model)


@case("VitrineNEMOBake")
def nemo_bake(s: Scene) -> Tensors:
    return _changed(s, s.call("VitrineNEMOBake", model=s.model, neurons=s.neurons)[0])


def _changed(s: Scene, model: Any, positive: Any = None) -> Tensors:
    """A sampling run that differs from the untouched model's, which is as before afterwards."""
    found = s.sampled(model, positive)["samples"]
    assert not torch.equal(found, s.sampled_while_recording["samples"])
    return [found]


@case("VitrineSaveNeurons")
def save_neurons(s: Scene) -> Tensors:
    assert Path(s.call("VitrineSaveNeurons", neurons=s.neurons, name=f"full-{s.family}")[0]).is_file()
    return []


@case("VitrineLoadNeurons")
def load_neurons(s: Scene) -> Tensors:
    save_neurons(s)
    assert s.call("VitrineLoadNeurons", file=f"full-{s.family}.json")[0].neurons == s.neurons.neurons
    return []


@case("VitrineNEMOVerify")
def nemo_verify(s: Scene) -> Tensors:
    told = {"neurons": s.neurons, "tau": 0.3, "attack_steps": 2, "reference": s.latent(side=SMALL)}
    return [s.call("VitrineNEMOVerify", positive=s.positive, **told, **_probe(s))[2][0][0]]


@case("VitrineNEMOCopyCheck")
def nemo_copy_check(s: Scene) -> Tensors:
    told = {"prompts": PROMPT, "ordinary": CAPTIONS, "seeds": 2, "steps": 2, "cfg": 3.0, "name": f"full_{s.family}"}
    models = {"model": s.model, "clip": s.clip, "vae": s.vae, "latent": s.latent()}
    report, shown, _ = s.call("VitrineNEMOCopyCheck", **models, **told)
    assert report
    return [shown]


@case("VitrineLoRAReport")
def lora_report(s: Scene) -> Tensors:
    models = {"model": s.model, "clip": s.clip, "vae": s.vae, "latent": s.latent(side=SMALL)}
    few = {"seeds": 2, "steps": 1, "prompts": 1, "compare": False, "name": f"full_{s.family}"}
    asked = {"lora": f"people-{s.family}/{s.family}-0.safetensors", "captions": PROMPT, "ordinary": CAPTIONS}
    report, shown, _ = s.call("VitrineLoRAReport", **asked, **models, **few)
    assert "what it is" in report
    return [shown]


@case("VitrineActivePatches")
def active_patches(s: Scene) -> Tensors:
    baked = s.call("VitrineNEMOBake", model=s.model, neurons=s.neurons)[0]
    _, text, count = s.call("VitrineActivePatches", model=baked)
    assert count and text
    return []


# --- W2W ----------------------------------------------------------------------------------------------------------
@case("VitrineBuildW2WSpace")
def build_space(s: Scene) -> Tensors:
    return [s.space.coefficients]


@case("VitrineLoadW2WSpace")
def load_space(s: Scene) -> Tensors:
    assert s.space is not None
    return [s.call("VitrineLoadW2WSpace", space_file=f"full_{s.family}.w2w.safetensors")[0].coefficients]


@case("VitrineTrainW2WDirection")
def train_direction(s: Scene) -> Tensors:
    return [s.trained.directions["slider"]]


@case("VitrineW2WSample")
def w2w_sample(s: Scene) -> Tensors:
    return [s.person.coefficients]


@case("VitrineW2WEdit")
def w2w_edit(s: Scene) -> Tensors:
    return [s.edited.coefficients]


@case("VitrineW2WBlend")
def w2w_blend(s: Scene) -> Tensors:
    return [s.call("VitrineW2WBlend", space=s.trained, w2w_model=s.person, other=s.edited)[0].coefficients]


@case("VitrineApplyW2WModel")
def apply_w2w(s: Scene) -> Tensors:
    told = {"space": s.trained, "w2w_model": s.person, "late_model": s.edited, "start": 700.0}
    return _changed(s, s.call("VitrineApplyW2WModel", model=s.model, **told)[0])


@case("VitrineSaveW2WLora")
def save_w2w(s: Scene) -> Tensors:
    told = {"space": s.trained, "w2w_model": s.person, "name": f"full-{s.family}"}
    assert Path(s.call("VitrineSaveW2WLora", **told)[0]).is_file()
    return []


@case("VitrineLoadW2WModel")
def load_w2w(s: Scene) -> Tensors:
    save_w2w(s)
    return [s.call("VitrineLoadW2WModel", file=f"full-{s.family}.w2wmodel.safetensors")[0].coefficients]


@case("VitrineW2WInvert")
def w2w_invert(s: Scene) -> Tensors:
    small, mask = pictures(1, 2 * SMALL)
    told = {"image": small, "mask": mask, "preset": "custom", "steps": 2, "batch": 1, "space": s.trained}
    return [s.call("VitrineW2WInvert", model=s.model, vae=s.vae, positive=s.positive, **told)[0].coefficients]


# --- EMD ----------------------------------------------------------------------------------------------------------
@case("VitrineEMDOneStepGenerator")
def emd_one_step(s: Scene) -> Tensors:
    latent, z, *_ = s.one_step
    return [latent["samples"], z["samples"]]


@case("VitrineEMDMCMCCorrect")
def emd_correct(s: Scene) -> Tensors:
    roles = {"teacher": s.model, "score": s.model, "model": s.model, "z": s.one_step[1]}
    told = {"steps": 1, "student": f"people-{s.family}/{s.family}-0.safetensors", "contract": STUDENT[s.family]}
    return [s.call("VitrineEMDMCMCCorrect", positive=s.positive, **roles, **told)[0]["samples"]]


# --- resolution, control ------------------------------------------------------------------------------------------
@case("VitrineResolutionTransferLoader")
def resolution(s: Scene) -> Tensors:
    sides = {"train_width": s.side // 2, "train_height": s.side // 2, "target_width": s.side, "target_height": s.side}
    model, guidance, report = s.call("VitrineResolutionTransferLoader", model=s.model, **sides)
    assert guidance and report
    return _changed(s, model)


@case("VitrineControlValues")
def control_values(s: Scene) -> Tensors:
    """What they change: SDXL's picture; nothing on SD1.5, which the node says."""
    told = s.call("VitrineControlValues", conditioning=s.positive, width=256, height=256)[0]
    found = s.sampled(s.model, told)["samples"]
    assert torch.equal(found, s.sampled_while_recording["samples"]) == (s.family == "sd15")
    return [found]


@case("VitrineApplyGammaSchedule")
def apply_gamma(s: Scene) -> Tensors:
    """SDXL; SD1.5, which is told no size, is refused."""
    told = s.call("VitrineControlValues", conditioning=s.positive, width=256, height=256)[0]
    try:
        model = s.call("VitrineApplyGammaSchedule", model=s.model)[0]
    except VitrineError as error:
        assert s.family == "sd15", error
        return []
    assert s.family == "sdxl"
    return [s.sampled(model, told)["samples"]]


@case("VitrineLoadControl")
def load_control(s: Scene) -> Tensors:
    told = s.call("VitrineControlValues", conditioning=s.positive, width=256, height=256)[0]
    return _changed(s, _controlled(s), told)


def _controlled(s: Scene) -> Any:
    """The model with a control checkpoint made for its shape."""
    import folder_paths
    from vitrine.engine.control import ControlEmbedder, ControlMetadata, ControlSpec, save_control

    folder = s.folder / "control"
    folder_paths.add_model_folder_path("vitrine_control", str(folder))
    torch.manual_seed(3)
    width = s.model.model.diffusion_model.time_embed[2].out_features
    made = ControlEmbedder(ControlSpec(), width, zero_init=False)
    facts = ControlMetadata("UNet2DConditionModel", made.dim)
    save_control(folder / f"full-{s.family}.safetensors", made.state_dict(), facts)
    folder_paths.filename_list_cache.clear()
    return s.call("VitrineLoadControl", model=s.model, file=f"full-{s.family}.safetensors")[0]


@case("VitrineControlCFGGuider")
def control_guider(s: Scene) -> Tensors:
    told = s.call("VitrineControlValues", conditioning=s.positive, width=256, height=256)[0]
    model = _controlled(s) if s.family == "sd15" else s.model
    guider = s.call("VitrineControlCFGGuider", model=model, positive=told, negative=s.negative, control=2.0)[0]
    return _under(s, guider, model)


@case("VitrineEntropyGuider")
def entropy_guider(s: Scene) -> Tensors:
    return _under(s, s.call("VitrineEntropyGuider", model=s.model, positive=s.positive)[0], s.model)


def _under(s: Scene, guider: Any, model: Any) -> Tensors:
    """Two steps of a guider."""
    make = s.comfy.nodes.NODE_CLASS_MAPPINGS
    with torch.inference_mode():
        noise = make["RandomNoise"].execute(noise_seed=5)[0]
        sampler = make["KSamplerSelect"].execute(sampler_name="euler")[0]
        sigmas = make["BasicScheduler"].execute(model=model, scheduler="normal", steps=2, denoise=1.0)[0]
        latent = s.latent()
        return [make["SamplerCustomAdvanced"].execute(noise, guider, sampler, sigmas, latent)[0]["samples"]]


@case("VitrineControlConditionedSampler")
def control_sampler(s: Scene) -> Tensors:
    model = _controlled(s) if s.family == "sd15" else s.model
    told = {"positive": s.positive, "negative": s.negative, "latent_image": s.latent(), "steps": 2, "control": 2.0}
    latent, curve, report = s.call("VitrineControlConditionedSampler", model=model, **told)
    assert "evaluations" in report
    return [latent["samples"], curve]


@case("VitrineNoisyReplicatePadding")
def replicate_padding(s: Scene) -> Tensors:
    told = {"conditioning": s.positive, "clip": s.clip, "text": PROMPT}
    padded = s.call("VitrineNoisyReplicatePadding", **told)[0]
    assert padded[0][0].shape == s.positive[0][0].shape and not torch.equal(padded[0][0], s.positive[0][0])
    return [padded[0][0]]
