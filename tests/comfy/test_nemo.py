"""NEMO's nodes in real ComfyUI, and against the pipeline."""

from dataclasses import replace

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import BlockConfig, Calibration, FewStepConfig, NeuronSet, ProbeConfig, SearchConfig
from vitrine.engine.nemo.adjust import recommended
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.pipelines.nemo_jobs import adjust_prompt, verify_blocking
from vitrine.engine.pipelines.nemo_prompts import conditions
from vitrine.engine.portraits import caption, load_portraits, plants, sample_scenes

PLANT = plants()[0].captions[0]
ORDINARY = caption(sample_scenes(range(200, 208)))
PROBE = ProbeConfig(seeds=4, timestep_index=4)
ASKED = {"seeds": 4, "timestep_index": 4}


@pytest.fixture(scope="module")
def pipe():
    return NEMOPipeline.from_pipe(load_portraits().pipeline())


@pytest.fixture(scope="module")
def parts(comfy):
    return comfy.call("VitrineLoadPortraits")


@pytest.fixture(scope="module")
def latent():
    return {"samples": torch.zeros(1, 4, 16, 16)}


@pytest.fixture(scope="module")
def calibration(comfy, parts, latent):
    """Everything, of eight captions."""
    told = {"model": parts[0], "clip": parts[1], "latent": latent, "prompts": "\n".join(ORDINARY), **ASKED}
    made, tau, report = comfy.call("VitrineNEMOCalibrate", **told)
    assert report == made.text() and tau == made.score.tau and len(report.splitlines()) == 3
    assert report.startswith("3 layers, 224 neurons, 8 captions\n8 ordinary captions: 4 samples of 4 steps, guidance 3")
    return made


def encode(comfy, clip, text):
    return comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(clip, text)[0]


def sample(comfy, model, clip, steps=4, cfg=3.0, prompt=PLANT):
    """Latents of core KSampler."""
    with torch.inference_mode():
        sampler = comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]()
        positive, negative = encode(comfy, clip, prompt), encode(comfy, clip, "")
        empty = {"samples": torch.zeros(1, 4, 16, 16)}
        (out,) = sampler.sample(model, 3, steps, cfg, "euler", "ddim_uniform", positive, negative, empty, 1.0)
    return out["samples"].clone()


def some(fingerprint):
    return NeuronSet({"down-level1-repeat0-vit-block0-cross-v": tuple(range(40))}, fingerprint)


@pytest.fixture(scope="module")
def neurons(pipe):
    from vitrine.engine.nemo import fingerprint_of

    return some(fingerprint_of(pipe.unet))


def detect(comfy, parts, latent, prompt, **more):
    told = {"model": parts[0], "latent": latent, "positive": encode(comfy, parts[1], prompt)}
    told["negative"] = encode(comfy, parts[1], "")
    return comfy.call("VitrineNEMODetect", **told | more)


@pytest.fixture(scope="module")
def ours(pipe):
    """The same calibration by the pipeline."""
    return pipe.calibrate(ORDINARY, probe=PROBE)


def test_a_calibration_equals_the_pipelines(ours, calibration):
    assert ours.statistics.fingerprint == calibration.statistics.fingerprint
    for address, mean in ours.statistics.means.items():
        assert torch.allclose(calibration.statistics.means[address].cpu(), mean, atol=1e-5)
    mine, theirs = ours.samples, calibration.samples
    assert (mine.count, mine.config, mine.fingerprint) == (theirs.count, theirs.config, theirs.fingerprint)
    assert mine.distance == pytest.approx(theirs.distance, abs=1e-5)
    assert torch.allclose(mine.places, theirs.places, atol=1e-5)
    assert ours.score.tau == pytest.approx(calibration.score.tau, abs=1e-5) and ours.score.probe == PROBE


@pytest.mark.parametrize("part", ["statistics", "samples", "score"])
def test_one_part_is_measured_where_one_is_asked_for(comfy, parts, latent, part):
    told = {"model": parts[0], "clip": parts[1], "latent": latent, "prompts": "\n".join(ORDINARY[:4])}
    made, tau, _ = comfy.call("VitrineNEMOCalibrate", measure=part, **told, **ASKED)
    present = [name for name in ("statistics", "samples", "score") if getattr(made, name) is not None]
    assert present == [part] and (tau > 0) == (part == "score")
    consumer = {"statistics": "score", "samples": "statistics", "score": "samples"}[part]
    with pytest.raises(VitrineError, match=f"calibration: given {part} alone; accepted: one with {consumer}"):
        if consumer == "statistics":
            asked = {"effect_fraction": 0.9, "mode": "chain", "scope": "down+mid", **ASKED}
            positive = encode(comfy, parts[1], PLANT)
            comfy.call(
                "VitrineNEMOFindNeurons", model=parts[0], positive=positive, latent=latent, calibration=made, **asked
            )
        else:
            method = "one step" if consumer == "score" else "samples"
            detect(comfy, parts, latent, PLANT, method=method, calibration=made)


def test_verdicts_by_samples_equal_the_pipelines(comfy, pipe, parts, latent, ours, calibration):
    empty = encode(comfy, parts[1], "")
    for prompt, memorized in ((PLANT, True), (ORDINARY[0], False)):
        (found,) = pipe.detect(prompt, ours, keep=True)
        told = {"negative": empty, "calibration": calibration, "vae": parts[2]}
        said, distance, report, samples, where = detect(comfy, parts, latent, prompt, **told)
        assert said is memorized is found.memorized and distance == pytest.approx(found.distance, abs=1e-5)
        assert ("agrees: whole picture" in report) is memorized
        assert report.splitlines()[0] == found.text().splitlines()[0]
        assert samples.shape == (4, 64, 64, 3) and where.shape == (1, 64, 64, 3)
    once, (staged,) = pipe.detect([PLANT], ours)[0], pipe.detect([PLANT], ours, config=FewStepConfig(two_stage=True))
    assert staged.count == 4 and staged.samples is None and staged.distance == pytest.approx(once.distance, abs=1e-5)


def test_without_a_calibration_there_is_no_verdict(comfy, parts, latent, calibration):
    empty = encode(comfy, parts[1], "")
    memorized, distance, report, *_ = detect(comfy, parts, latent, PLANT, negative=empty, steps=2)
    assert memorized is False and distance > 0 and report.startswith("no verdict") and "2 steps" in report
    memorized, score, report, *_ = detect(comfy, parts, latent, PLANT, method="one step", **ASKED)
    assert memorized is False and 0 < score < 1 and report.startswith("no verdict") and "tau" not in report
    other = Calibration(samples=replace(calibration.samples, fingerprint="0" * 64))
    with pytest.raises(VitrineError, match="this model"):
        detect(comfy, parts, latent, PLANT, negative=empty, calibration=other)


def test_verdicts_in_one_step_equal_the_pipelines(comfy, pipe, parts, latent, ours, calibration):
    told = {"method": "one step", "calibration": calibration, "vae": parts[2]}
    for prompt in (PLANT, ORDINARY[0]):
        (found,) = pipe.detect(prompt, ours, "one step")
        memorized, score, report, pictures, _ = detect(comfy, parts, latent, prompt, **told)
        assert score == pytest.approx(found.value, abs=1e-5) and memorized is found.memorized
        assert (
            report.startswith("memorized: " if memorized else "not memorized: ")
            and f"tau {ours.score.tau:.3f}" in report
        )
        assert pictures.shape == (4, 64, 64, 3) and f"timestep index {PROBE.timestep_index} of 50" in report
    assert pipe.detect(PLANT, ours, "one step")[0].memorized


def test_a_search_equals_the_pipelines(comfy, pipe, parts, latent, ours, calibration):
    positive = encode(comfy, parts[1], PLANT)
    told = {"model": parts[0], "positive": positive, "latent": latent, **ASKED}
    found, report, picture, doses, same = comfy.call(
        "VitrineNEMOFindNeurons", **told, calibration=calibration, effect_fraction=0.9, mode="chain", scope="down+mid"
    )
    (result,) = pipe.find([PLANT], replace(ours, samples=None), SearchConfig(effect_fraction=0.9), PROBE)
    assert len(found) and found.neurons == pipe.neurons(result).neurons
    assert found.info["verdict"] == result.verdict != "no verdict"
    assert found.fingerprint == pipe.neurons(result).fingerprint and "before" in report
    assert picture.shape[-1] == 3 and float(picture.max()) == 1.0 and doses.shape == (1, 8, 8, 3)
    assert same is positive


@pytest.mark.nightly
def test_a_search_is_judged_by_samples_as_the_pipelines_is(comfy, pipe, parts, latent, ours, calibration):
    found, report, _, doses, moved = comfy.call(
        "VitrineNEMOFindNeurons",
        model=parts[0],
        latent=latent,
        positive=encode(comfy, parts[1], PLANT),
        calibration=calibration,
        effect_fraction=0.9,
        mode="fast",
        scope="down+mid",
        negative=encode(comfy, parts[1], ""),
        clip=parts[1],
        adjust=True,
        **ASKED,
    )
    (result,) = pipe.find([PLANT], ours, SearchConfig(effect_fraction=0.9, mode="fast"), PROBE)
    assert found.neurons == pipe.neurons(result).neurons and len(found)
    assert found.info["verdict"] == result.verdict and result.verdict in ("cured", "reduced")
    assert found.factor == result.curve.chosen.dose.factor and doses.shape == (1, 320, 560, 3)
    assert "4 samples differ by" in report and "first seed 1" in report and "<- chosen" in report
    other = adjust_prompt(pipe, PLANT, ours)
    assert torch.allclose(moved[0][0], other.condition.text, atol=1e-3) and other.text() in report
    assert not torch.allclose(moved[0][0], conditions(pipe, [PLANT])[0].text, atol=1e-2)
    assert report.splitlines()[-1] == recommended(result.curve, other)


def test_adjusting_needs_what_it_compares_with(comfy, parts, latent, calibration):
    told = {"model": parts[0], "positive": encode(comfy, parts[1], PLANT), "latent": latent, **ASKED}
    with pytest.raises(VitrineError, match="adjust"):
        comfy.call(
            "VitrineNEMOFindNeurons",
            **told,
            calibration=calibration,
            effect_fraction=0.9,
            mode="fast",
            scope="down+mid",
            adjust=True,
        )


def test_baking_reads_the_checkpoint_not_what_another_branch_left_on_it(comfy, parts, neurons):
    model = parts[0]
    (wanted,) = comfy.call("VitrineNEMOBake", model=model, neurons=neurons, factor=0.0)
    other = model.clone()
    other.add_patches({key: (torch.ones_like(part[0][1][0]),) for key, part in wanted.patches.items()}, 1.0)
    other.patch_model()  # a LoRA of another branch, still on the shared weights
    try:
        (found,) = comfy.call("VitrineNEMOBake", model=model, neurons=neurons, factor=0.0)
    finally:
        other.unpatch_model()
    assert wanted.patches and found.patches.keys() == wanted.patches.keys()
    for key, (made,) in found.patches.items():
        assert torch.equal(made[1][0], wanted.patches[key][0][1][0]), key


def test_blocked_sampling_equals_the_pipelines_and_the_baked_model(comfy, pipe, parts, neurons):
    model, clip, _ = parts
    plain = sample(comfy, model, clip)
    (blocked,) = comfy.call(
        "VitrineNEMONeuronBlocker",
        model=model,
        neurons=neurons,
        factor=0.0,
        branch="both",
        start_percent=0.0,
        end_percent=1.0,
    )
    ours = sample(comfy, blocked, clip)
    (baked,) = comfy.call("VitrineNEMOBake", model=model, neurons=neurons, factor=0.0)
    assert torch.allclose(ours, sample(comfy, baked, clip), atol=1e-5)
    assert float((ours - plain).abs().max()) > 0.1
    assert torch.equal(plain, sample(comfy, model, clip)), "the sibling branch must not see the hooks"


@pytest.mark.parametrize(
    "config",
    [BlockConfig(), BlockConfig(0.3, "cond"), BlockConfig(0.0, "both", 0.3, 0.8), BlockConfig(tokens=(1, 2, 9))],
)
def test_node_and_pipeline_block_alike(comfy, pipe, parts, neurons, config):
    """One denoising step in both doors from the same noise: the same rows and the same part of sampling."""
    from diffusers import EulerDiscreteScheduler

    model, clip, _ = parts
    told = {
        "factor": config.factor or 0.0,
        "branch": config.branch,
        "start_percent": config.start_percent,
        "end_percent": config.end_percent,
    }
    told["tokens"] = ", ".join(map(str, config.tokens or ()))
    (blocked,) = comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=neurons, **told)
    theirs = sample(comfy, blocked, clip, steps=8)
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
    fresh = NEMOPipeline.from_pipe(pipe)
    fresh.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="leading")
    fresh.set_progress_bar_config(disable=True)
    fresh.scheduler.set_timesteps(8)
    noise = noise * fresh.scheduler.sigmas[0] / fresh.scheduler.init_noise_sigma  # ComfyUI scales by sigma alone
    kwargs = {"num_inference_steps": 8, "guidance_scale": 3.0, "latents": noise, "output_type": "latent"}
    ours = fresh(PLANT, height=64, width=64, neurons=neurons, block_config=config, **kwargs).images
    assert float((ours - theirs * fresh.vae.config.scaling_factor).abs().max()) < 1e-5


def test_off_is_identity(comfy, parts, neurons):
    model = parts[0]
    told = {"branch": "both", "start_percent": 0.0, "end_percent": 1.0}
    assert comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=neurons, factor=1.0, **told)[0] is model
    assert comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=NeuronSet({}), factor=0.0, **told)[0] is model
    told |= {"factor": 0.0, "model": model, "neurons": neurons}
    every = [f"{a} {i}" for a, indices in neurons.neurons.items() for i in indices]
    assert comfy.call("VitrineNEMONeuronBlocker", spared="\n".join(every), **told)[0] is model


def test_an_unset_factor_is_the_neurons_own(comfy, parts, neurons):
    model, clip, _ = parts
    told = {"branch": "both", "start_percent": 0.0, "end_percent": 1.0, "model": model}
    dosed = NeuronSet(neurons.neurons, neurons.fingerprint, factor=-0.5)

    def blocked(of, factor):
        (patched,) = comfy.call("VitrineNEMONeuronBlocker", neurons=of, factor=factor, **told)
        return sample(comfy, patched, clip, steps=2)

    own, zero = blocked(dosed, 0.0), blocked(neurons, 0.0)
    assert torch.equal(own, blocked(neurons, -0.5)) and not torch.equal(own, zero)
    (baked,) = comfy.call("VitrineNEMOBake", model=model, neurons=dosed, factor=0.0)
    assert torch.allclose(own, sample(comfy, baked, clip, steps=2), atol=1e-5)


def test_spared_neurons_are_not_blocked(comfy, parts, neurons):
    model, clip, _ = parts
    told = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0, "model": model}
    address, (first, *_) = next(iter(neurons.neurons.items()))
    (spared,) = comfy.call("VitrineNEMONeuronBlocker", neurons=neurons, spared=f"{address} {first}", **told)
    (less,) = comfy.call("VitrineNEMONeuronBlocker", neurons=neurons.without({address: (first,)}), **told)
    assert torch.equal(sample(comfy, spared, clip, steps=2), sample(comfy, less, clip, steps=2))
    with pytest.raises(VitrineError, match="not blocked"):
        comfy.call("VitrineNEMONeuronBlocker", neurons=neurons, spared=f"{address} 90000", **told)


def test_a_lora_after_the_blocker_does_not_revive(comfy, parts, neurons):
    """The blocked channels' outputs are zero whatever the weights become."""
    model, clip, _ = parts
    keys = [k for k in model.model_state_dict() if k.endswith("attn2.to_v.weight")]
    chosen = next(k for k in keys if model.model_state_dict()[k].shape[0] == 96)
    weight = model.model_state_dict()[chosen]
    rows = torch.zeros_like(weight)
    rows[list(range(40))] = torch.randn(40, weight.shape[1], generator=torch.Generator().manual_seed(0))
    told = {"neurons": neurons, "factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0}
    (blocked,) = comfy.call("VitrineNEMONeuronBlocker", model=model, **told)
    with_lora = blocked.clone()
    with_lora.add_patches({chosen: (rows,)}, 1.0)  # a LoRA on exactly the blocked channels
    lora_first = model.clone()
    lora_first.add_patches({chosen: (rows,)}, 1.0)
    (blocked_after,) = comfy.call("VitrineNEMONeuronBlocker", model=lora_first, **told)
    reference = sample(comfy, blocked, clip)
    assert torch.equal(reference, sample(comfy, with_lora, clip))
    assert torch.equal(reference, sample(comfy, blocked_after, clip))
    assert not torch.equal(sample(comfy, model, clip), sample(comfy, lora_first, clip))


def test_neurons_are_saved_loaded_and_refused(comfy, parts, neurons, tmp_path):
    (path,) = comfy.call("VitrineSaveNeurons", neurons=neurons, name="forty")
    assert comfy.call("VitrineLoadNeurons", file="forty.json")[0] == neurons and path.endswith("forty.json")
    told = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0}
    with pytest.raises(ValueError, match="find the neurons on this model"):
        comfy.call("VitrineNEMONeuronBlocker", model=parts[0], neurons=some("feedfeedfeedfeed"), **told)
    with pytest.raises(ValueError, match="one a line"):
        blank = {"samples": torch.zeros(1, 4, 16, 16)}
        comfy.call("VitrineNEMOCalibrate", model=parts[0], clip=parts[1], latent=blank, prompts="one")


@pytest.mark.parametrize("origin", ["SD1.4", "feedfeedfeedfeed"])
def test_statistics_of_another_model_are_refused_as_by_the_pipeline(comfy, pipe, parts, latent, calibration, origin):
    foreign, refusals = Calibration(replace(calibration.statistics, fingerprint=origin)), []
    node = {"model": parts[0], "positive": encode(comfy, parts[1], PLANT), "latent": latent, "calibration": foreign}
    settings = {"effect_fraction": 0.9, "mode": "chain", "scope": "down+mid", **ASKED}
    for search in (
        lambda: comfy.call("VitrineNEMOFindNeurons", **node, **settings),
        lambda: pipe.find([PLANT], foreign),
    ):
        with pytest.raises(ValueError, match=f"statistics: given model {origin}") as error:
            search()
        refusals.append(str(error.value))
    assert refusals[0] == refusals[1]


def test_verify_equals_the_pipelines_and_the_attack_works(comfy, pipe, parts, latent, neurons):
    from vitrine.engine.portraits import render

    picture = render(plants()[0].scenes).images
    with torch.inference_mode():
        latents = comfy.nodes.NODE_CLASS_MAPPINGS["VAEEncode"]().encode(parts[2], picture.permute(0, 2, 3, 1))[0]
    told = {"model": parts[0], "latent": latent, "neurons": neurons, "tau": 0.5, "seeds": 3, "timestep_index": 4}
    positive = encode(comfy, parts[1], PLANT)
    text, cured, adversarial = comfy.call(
        "VitrineNEMOVerify", positive=positive, seed=101, attack_steps=2, reference=latents, **told
    )
    ours = verify_blocking(pipe, PLANT, neurons, 0.5, probe=ProbeConfig(seeds=3, timestep_index=4))
    assert f"{ours.untouched.value:.3f} untouched, {ours.blocked.value:.3f} blocked" in text
    assert cured == (ours.untouched.memorized and not ours.blocked.memorized) and "optimised embedding" in text
    moved = float((adversarial[0][0] - positive[0][0]).abs().max())
    assert 0.05 < moved < 0.5, "two Adam steps of 0.1"
    again, _, same = comfy.call("VitrineNEMOVerify", positive=positive, seed=101, attack_steps=50, **told)
    assert "not tried" in again and same is positive
    backbone = parts[0].model.diffusion_model
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())


def test_blocking_at_chosen_tokens(comfy, pipe, parts, neurons):
    model, clip, _ = parts
    told = {
        "model": model,
        "neurons": neurons,
        "factor": 0.0,
        "branch": "cond",
        "start_percent": 0.0,
        "end_percent": 1.0,
    }
    everywhere, all_of_them, few = (
        sample(comfy, comfy.call("VitrineNEMONeuronBlocker", **told, tokens=t)[0], clip) for t in ("", "0-23", "1-2, 9")
    )
    assert torch.equal(everywhere, all_of_them) and not torch.equal(everywhere, few)


def test_long_prompts_are_scored(comfy, parts, latent):
    long = " ".join(["a smiling dark face with bald head on pink"] * 18)
    assert len(long.split()) > 150
    positive = encode(comfy, parts[1], long)
    _, score, *_ = detect(comfy, parts, latent, long, method="one step", seeds=3, timestep_index=15)
    assert positive[0][0].shape[1] > 24 and 0 < score < 1


@pytest.mark.nightly
def test_published_statistics_are_read(comfy, parts, calibration, latent, monkeypatch):
    """A file in the published format gives what was measured; the portraits model counts as SD 1.x here."""
    from vitrine.engine.nemo import neuron_statistics
    from vitrine.nodes.comfy import saved

    folder, measured = saved.folder("vitrine_statistics"), calibration.statistics
    folder.mkdir(parents=True, exist_ok=True)
    torch.save((list(measured.means.values()), list(measured.stds.values())), folder / "authors.pt")
    told = {"model": parts[0], "clip": parts[1], "latent": latent, "prompts": "", "published": "authors.pt"}
    with pytest.raises(VitrineError, match="statistics: given model SD1.4"):
        comfy.call("VitrineNEMOCalibrate", **told)
    unet = parts[0].model.diffusion_model
    sites = neuron_statistics.value_sites(unet)
    shapes = tuple(tuple(unet.get_submodule(site.path).weight.shape) for site in sites)
    monkeypatch.setattr(neuron_statistics, "OFFICIAL_SHAPES", shapes)
    read, tau, report = comfy.call("VitrineNEMOCalibrate", **told)
    assert report.startswith("3 layers, 224 neurons, 50000 captions\n") and report.endswith(", as published")
    assert tau == 0.428 and all(torch.equal(read.statistics.means[a], v) for a, v in measured.means.items())
    search = {"model": parts[0], "latent": latent, "positive": encode(comfy, parts[1], PLANT), "calibration": read}
    asked = {"effect_fraction": 0.98, "mode": "chain", "scope": "down+mid", "protocol": "nemo"}
    assert comfy.call("VitrineNEMOFindNeurons", **search, **asked, seeds=10, timestep_index=1)[1]
    with pytest.raises(VitrineError, match="tau"):
        comfy.call("VitrineNEMOFindNeurons", **search, **asked, seeds=2, timestep_index=4)
