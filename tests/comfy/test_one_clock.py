"""Steps and shares of a run are those of its own noise levels; records belong to one run and to its own tokens."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine_tests.comfy.guided_graphs import MIDDLE, NEURONS, VALUES, cfg, encoded, patched, sampled
from vitrine_tests.lanes import nightly_but

STEPS = 12


@pytest.fixture(scope="module")
def scene(comfy):
    comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
    model, clip, _ = comfy.call("VitrineLoadPortraits")
    return model, encoded(clip), clip


def tapped(comfy, model, addresses=MIDDLE):
    return comfy.call("VitrineTapDuringSampling", model=model, layers=addresses, record_steps="all")


def blocked(comfy, model, **settings):
    told = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0} | settings
    return comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=NEURONS, **told)[0]


def ksampler(comfy, model, conds, seed=3, denoise=1.0, scheduler="normal", steps=STEPS):
    start = {"samples": torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(8))}
    told = (seed, steps, 2.0, "euler", scheduler, conds["positive"], conds["negative"], start, denoise)
    with torch.inference_mode():
        return comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]().sample(model, *told)[0]


@pytest.mark.parametrize("cache", ["LazyCache", "EasyCache"])
def test_steps_that_a_cache_skips_keep_their_numbers(comfy, scene, cache):
    from comfy import samplers

    model, conds, _ = scene
    cached = patched(comfy, cache, model, reuse_threshold=1.0, start_percent=0.0, end_percent=1.0)
    watched, recorder = tapped(comfy, cached)
    assert torch.equal(sampled(cfg(watched, conds), STEPS), sampled(cfg(cached, conds), STEPS))
    sigmas = samplers.KSampler(model, STEPS, "cpu", "euler", "ddim_uniform").sigmas
    sampling = model.get_model_object("model_sampling")
    steps = list(recorder.record)
    assert 1 < len(steps) < STEPS and steps[0] == 0
    assert all(recorder.record.timesteps[i] == pytest.approx(float(sampling.timestep(sigmas[i]))) for i in steps)


def acting(comfy, model, monkeypatch, call, **settings):
    """Whether the blocker acts, forward by forward."""
    from vitrine.nodes.comfy import nemo

    acts, real = [], nemo.block

    def noted(network, neurons, config, *, running, **more):
        acts.append(running.active)
        return real(network, neurons, config, running=running, **more)

    with monkeypatch.context() as patch:
        patch.setattr(nemo, "block", noted)
        call(blocked(comfy, model, **settings))
    return acts


SCHEDULERS = ["normal", "karras", "exponential", "beta", "sgm_uniform"]


@pytest.mark.parametrize("scheduler", nightly_but(SCHEDULERS, ["karras", "sgm_uniform"]))
@pytest.mark.parametrize("denoise", [1.0, 0.5])
def test_a_share_is_of_the_runs_own_steps(comfy, scene, monkeypatch, scheduler, denoise):
    model, conds, _ = scene

    def run(patched):
        ksampler(comfy, patched, conds, denoise=denoise, scheduler=scheduler, steps=10)

    assert acting(comfy, model, monkeypatch, run, end_percent=0.5) == [True] * 5 + [False] * 5
    expected = [False] * 3 + [True] * 3 + [False] * 4
    assert acting(comfy, model, monkeypatch, run, start_percent=0.3, end_percent=0.6) == expected


def test_two_samplers_of_one_recording_model(comfy, scene):
    """The graph of a hires fix: each Collect Taps has the run of its own LATENT."""
    model, conds, _ = scene
    graph = {
        "1": ("VitrineLoadPortraits", {"model": "portraits, 64 px"}),
        "2": ("CLIPTextEncode", {"text": "a smiling face", "clip": ["1", 1]}),
        "4": ("EmptyLatentImage", {"width": 128, "height": 128, "batch_size": 1}),
        "9": ("VitrineTapDuringSampling", {"model": ["1", 0], "layers": MIDDLE, "record_steps": "all"}),
        "11": ("KSampler", {"model": ["9", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["4", 0],
                            "seed": 5, "steps": 3, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal",
                            "denoise": 1.0}),
        "13": ("KSampler", {"model": ["9", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["11", 0],
                            "seed": 6, "steps": 4, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal",
                            "denoise": 0.5}),
        "12": ("VitrineCollectTaps", {"recorder": ["9", 1], "latent": ["11", 0], "step": -1, "half": "cond"}),
        "14": ("VitrineCollectTaps", {"recorder": ["9", 1], "latent": ["13", 0], "step": -1, "half": "cond"}),
        "22": ("VitrineSaveActivations", {"activations": ["12", 0], "name": "first"}),
        "24": ("VitrineSaveActivations", {"activations": ["14", 0], "name": "second"}),
    }  # fmt: skip
    from vitrine.engine.activations import Activations

    graph = {number: {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in graph.items()}
    executor = comfy.executor()
    shown, error = comfy.run(graph, executor)
    assert error is None, error
    first, second = (read(shown, Activations, node) for node in ("22", "24"))
    assert first.info.step == 2 and second.info.step == 3
    assert first.info.timestep > second.info.timestep or not torch.equal(first[MIDDLE].tensor, second[MIDDLE].tensor)
    graph["13"]["inputs"]["seed"] = 7  # the first sampler is cached: its record is still there
    graph["12"]["inputs"]["step"] = 0
    shown, error = comfy.run(graph, executor)
    assert error is None, error
    again = read(shown, Activations, "22")
    assert again.info.step == 0 and again.info.timestep > 900


def read(shown, activations, node):
    import folder_paths

    (line,) = shown["outputs"][node]["text"]
    name = line.splitlines()[0].replace("\\", "/").rpartition("/")[2]
    return activations.load(f"{folder_paths.get_output_directory()}/vitrine_activations/{name}")


def test_a_latent_of_no_recorded_run_is_refused(comfy, scene):
    from vitrine.nodes.comfy.recording import Recorded, Recorder

    model, conds, _ = scene
    watched, recorder = tapped(comfy, model)
    out = ksampler(comfy, watched, conds, steps=3)
    assert recorder.activations(-1, "cond", out).info.step == 2
    plain = ksampler(comfy, model, conds, steps=3, seed=9)
    assert not torch.equal(plain["samples"], out["samples"])
    for other in (plain, {"samples": torch.zeros(1, 4, 16, 16)}, {"samples": out["samples"] * 2}):
        with pytest.raises(VitrineError, match="did not come out of the recorded run"):
            recorder.activations(-1, "cond", other)
    several = Recorder([Recorded(recorder.record, ("5", n), "p", latent=str(n)) for n in range(2)])
    with pytest.raises(VitrineError, match="latent"):
        several.activations(-1, "cond", out)
    assert recorder.runs[0].latent and several.of(None) is recorder.record


def test_a_list_of_seeds_gives_each_its_own(comfy, scene):
    from comfy_execution.utils import CurrentNodeContext

    model, conds, _ = scene
    watched, recorder = tapped(comfy, model)
    outs = []
    for n, seed in enumerate((1, 2, 3)):
        with CurrentNodeContext("p", "11", n):
            outs.append(ksampler(comfy, watched, conds, seed=seed, steps=2))
    maps = [recorder.activations(-1, "cond", out)[MIDDLE].tensor for out in outs]
    alone, single = tapped(comfy, model)
    for seed, found in zip((1, 2, 3), maps, strict=True):
        ksampler(comfy, alone, conds, seed=seed, steps=2)
        assert torch.equal(found, single.activations(-1, "cond")[MIDDLE].tensor)
    with CurrentNodeContext("q", "11", None):
        ksampler(comfy, watched, conds, seed=4, steps=2)
    assert len(recorder.runs) == 1, "the list is over"


def longer(conds, times):
    """The negative is a prompt of several times the positive's length, as core's encoder gives for a long text."""
    text = conds["middle"][0][0]
    more = [text, *(text.roll(k, 1) for k in range(1, times))]
    return conds | {"negative": [[torch.cat(more, 1), conds["negative"][0][1]]]}


def test_tokens_count_in_a_prompts_own_length(comfy, scene):
    """Core repeats the shorter prompt: alone and beside one three times as long, the same tokens are blocked."""
    model, conds, _ = scene
    at = blocked(comfy, model, branch="cond", tokens="3-6")
    mixed = longer(conds, 3)

    def positive_of(patched, conds):
        seen = []
        clone = patched.clone()
        clone.set_model_sampler_pre_cfg_function(lambda args: seen.append(args["conds_out"][0]) or args["conds_out"])
        sampled(cfg(clone, conds), 1)
        return seen[0]

    alone, beside = positive_of(at, conds), positive_of(at, mixed)
    assert torch.allclose(alone, beside, atol=1e-4)
    assert not torch.allclose(alone, positive_of(model, mixed), atol=1e-3)


def test_maps_of_a_repeated_prompt_are_folded(comfy, scene):
    model, conds, _ = scene
    places = f"{VALUES} down-level1-repeat0-vit-block0-cross-map"
    watched, recorder = tapped(comfy, model, places)
    sampled(cfg(watched, conds), 1)
    alone = recorder.record[0]
    sampled(cfg(watched, longer(conds, 3)), 1)
    beside = recorder.record[0]
    for place in places.split():
        assert beside["cond"][place].tensor.shape == alone["cond"][place].tensor.shape
        assert torch.allclose(beside["cond"][place].tensor, alone["cond"][place].tensor, atol=1e-5)
        assert beside["uncond"][place].tensor.shape != alone["uncond"][place].tensor.shape


def one_sampler(seed, step=-1):
    nodes = {
        "1": ("VitrineLoadPortraits", {"model": "portraits, 64 px"}),
        "2": ("CLIPTextEncode", {"text": "a smiling face", "clip": ["1", 1]}),
        "4": ("EmptyLatentImage", {"width": 128, "height": 128, "batch_size": 1}),
        "9": ("VitrineTapDuringSampling", {"model": ["1", 0], "layers": MIDDLE, "record_steps": "all"}),
        "11": ("KSampler", {"model": ["9", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["4", 0],
                            "seed": seed, "steps": 3, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal",
                            "denoise": 1.0}),
        "12": ("VitrineCollectTaps", {"recorder": ["9", 1], "latent": ["11", 0], "step": step, "half": "cond"}),
        "22": ("VitrineSaveActivations", {"activations": ["12", 0], "name": "cached"}),
    }  # fmt: skip
    return {number: {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in nodes.items()}


def test_an_output_that_a_cache_brings_back_is_not_read_as_the_newest_run(comfy):
    """With --cache-lru a sampler's older output returns without a run; its recording has been replaced."""
    from vitrine.engine.activations import Activations

    cache = {"cache_type": comfy.execution.CacheType.LRU, "cache_args": {"ram": 0, "ram_inactive": 0, "lru": 20}}
    executor, taps = comfy.execution.PromptExecutor(comfy.server, **cache), []
    for seed in (1, 2):
        shown, error = comfy.run(one_sampler(seed), executor)
        assert error is None, error
        taps.append(read(shown, Activations, "22")[MIDDLE].tensor)
    assert not torch.allclose(taps[0], taps[1], atol=1e-2)
    _, error = comfy.run(one_sampler(1, step=0), executor)
    assert error is not None and "did not come out of" in error
    shown, error = comfy.run(one_sampler(3, step=0), executor)
    assert error is None, error


def test_the_clean_output_of_a_custom_sampler_is_of_its_run(comfy, scene):
    """SamplerCustomAdvanced puts out what the last step predicted beside where it ended, above 0 not the same."""
    from comfy import samplers
    from comfy_extras.nodes_custom_sampler import Noise_RandomNoise, SamplerCustomAdvanced

    model, conds, _ = scene
    watched, recorder = tapped(comfy, model)
    guider = samplers.CFGGuider(watched)
    guider.set_conds(conds["positive"], conds["negative"])
    guider.set_cfg(2.0)
    sigmas = samplers.KSampler(watched, 4, "cpu", "euler", "simple").sigmas[:3]
    euler, empty = samplers.sampler_object("euler"), {"samples": torch.zeros(1, 4, 16, 16)}
    with torch.inference_mode():
        out, clean = SamplerCustomAdvanced.execute(Noise_RandomNoise(3), guider, euler, sigmas, empty).result
    assert not torch.allclose(out["samples"], clean["samples"], atol=1e-2)
    for latent in (out, clean):
        assert recorder.activations(-1, "cond", latent).info.step == 1
