"""NEMOPipeline on the portraits model."""

from dataclasses import replace

import pytest
import torch
from diffusers import StableDiffusionPipeline
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import (
    BlockConfig,
    Calibration,
    NeuronSet,
    ProbeConfig,
    SearchConfig,
    fingerprint_of,
    make_probe,
    neuron_statistics,  # noqa: I001
    score_prompts,
    value_sites,
)
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.pipelines.nemo_jobs import import_statistics
from vitrine.engine.pipelines.nemo_prompts import conditions, latent_shape
from vitrine.engine.portraits import caption, load_portraits, plants, render, sample_scenes
from vitrine.engine.tracing.fingerprint import width_of

pytestmark = pytest.mark.rounding
PLACE = "down-level1-repeat0-vit-block0-cross-v"
KWARGS = {"num_inference_steps": 3, "guidance_scale": 3.0, "output_type": "latent", "height": 64, "width": 64}


@pytest.fixture(scope="module")
def pipe():
    made = NEMOPipeline.from_pipe(load_portraits().pipeline())
    made.set_progress_bar_config(disable=True)
    return made


def latents(pipe, prompt="a smiling dark face with bald head on pink", **more):
    return pipe(prompt, generator=torch.Generator().manual_seed(0), **KWARGS, **more).images


def forty(pipe):
    return NeuronSet({PLACE: tuple(range(40))}, fingerprint_of(pipe.unet))


def test_off_is_identity_and_blocking_leaves_no_trace(pipe, no_hooks_left):
    stock = latents(StableDiffusionPipeline.from_pipe(pipe))
    assert torch.equal(stock, latents(pipe)) and torch.equal(stock, latents(pipe, neurons=NeuronSet({})))
    blocked = latents(pipe, neurons=forty(pipe))
    assert not torch.equal(stock, blocked) and torch.equal(stock, latents(pipe))
    no_hooks_left(pipe.unet)
    twice = latents(pipe, neurons=[forty(pipe), forty(pipe)])
    assert torch.equal(blocked, twice)


def test_branch_and_part_of_sampling(pipe):
    neurons, stock = forty(pipe), latents(pipe)
    never = latents(pipe, neurons=neurons, block_config=BlockConfig(start_percent=0.0, end_percent=0.0))
    assert torch.equal(stock, never)
    whole, cond = (latents(pipe, neurons=neurons, block_config=BlockConfig(branch=b)) for b in ("both", "cond"))
    late = latents(pipe, neurons=neurons, block_config=BlockConfig(start_percent=0.5))
    assert len({tuple(x.flatten()[:4].tolist()) for x in (stock, whole, cond, late)}) == 4


@pytest.mark.parametrize("size", [(96, 64), (48, 128)])
def test_a_call_of_another_size_is_blocked_as_its_own_is(pipe, size, no_hooks_left):
    """Wider, taller, and several pictures at once: as with those neurons' weights taken out."""
    call = {"height": size[0], "width": size[1], "num_inference_steps": 2, "output_type": "latent"}

    def drawn(model, **more):
        generator = torch.Generator().manual_seed(0)
        return model(["a face on pink", "a bald head"], generator=generator, **call, **more).images

    untouched, blocked = drawn(pipe), drawn(pipe, neurons=forty(pipe))
    assert blocked.shape == (2, 4, size[0] // 4, size[1] // 4) and (untouched - blocked).abs().amax((1, 2, 3)).min() > 0
    without = load_portraits()
    with torch.no_grad():
        site = next(s for s in value_sites(without.unet, "all") if s.address == PLACE)
        without.unet.get_submodule(site.path).weight[:40] = 0
    other = StableDiffusionPipeline.from_pipe(without.pipeline())
    other.set_progress_bar_config(disable=True)
    assert (drawn(other) - blocked).abs().max() < 1e-4
    no_hooks_left(pipe.unet)


@pytest.mark.nightly
def test_scores_and_searches_of_another_size(pipe):
    source, probe = load_portraits().pipeline(), ProbeConfig(seeds=3, timestep_index=4)
    wide = NEMOPipeline.from_pipe(source, size=(48, 96))
    assert latent_shape(wide) == (4, 12, 24) and latent_shape(NEMOPipeline.from_pipe(source)) == (4, 16, 16)
    texts = [plants()[2].captions[0], "a smiling face"]
    conds = conditions(wide, texts)
    expected = score_prompts(make_probe(Denoiser.from_diffusers(source), config=probe), conds, (4, 12, 24), 0.5)[0]
    scores = wide.detect(texts, None, "one step", probe)
    assert all(torch.equal(a.per_seed, b.per_seed) for a, b in zip(scores, expected, strict=True))
    statistics = wide.calibrate(caption(sample_scenes(range(20))), ["statistics"])
    (result,) = wide.find(texts[:1], statistics, SearchConfig(tau=1e-3, effect_fraction=0.5), probe)
    assert result.search is not None and len(wide.neurons(result)) > 0
    with pytest.raises(VitrineError, match="multiples of 4"):
        NEMOPipeline.from_pipe(source, size=(50, 64))


def test_detection_resumes_and_tells_a_memorized_caption(pipe, tmp_path):
    ordinary, state = caption(sample_scenes(range(100, 112))), tmp_path / "usual"

    def stop(step, total, preview=None):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe.calibrate(ordinary, ["samples"], progress=stop, state=state)
    seen = []
    told = {"progress": lambda step, total, _=None: seen.append((step, total)), "state": state}
    known = pipe.calibrate(ordinary, ["samples"], **told)
    assert seen == [(1000, 1000)], "the first ten were kept"
    usual = known.samples
    assert usual.count == 12 and usual.distance < usual.usual and usual.check(usual.fingerprint)
    texts = [plants()[2].captions[0], *ordinary[:2]]
    found = pipe.detect(texts, known, state=tmp_path / "found.safetensors")
    again = pipe.detect(texts, known, state=tmp_path / "found.safetensors", progress=stop)
    assert [a.verdict for a in found] == ["memorized", "not memorized", "not memorized"]
    for a, b in zip(found, again, strict=True):
        assert torch.equal(a.distances, b.distances) and a.area == b.area and b.samples is None
    with pytest.raises(VitrineError, match="begun with"):
        pipe.detect(texts[:2], known, state=tmp_path / "found.safetensors")
    with pytest.raises(VitrineError, match="keep"):
        pipe.detect(texts, known, state=state, keep=True)


@pytest.mark.nightly
def test_the_published_rule_leaves_prompts_below_tau_alone(pipe):
    """By default what is asked is searched; the published rule goes on to its threshold, whatever the effect."""
    texts, probe = [plants()[2].captions[0], "a smiling face"], ProbeConfig(seeds=4, timestep_index=4)
    statistics = pipe.calibrate(caption(sample_scenes(range(20))), ["statistics"])
    published = SearchConfig(tau=1.0, effect_fraction=0.5, protocol="nemo")
    assert all(r.search is None for r in pipe.find(texts, statistics, published, probe))
    asked = pipe.find(texts, statistics, SearchConfig(effect_fraction=0.5), probe)
    assert all(r.search is not None and r.verdict == "no verdict" for r in asked)
    further = pipe.find(texts, statistics, replace(published, tau=1e-6), probe)
    counts = [[sum(map(len, r.search.neurons.values())) for r in results] for results in (asked, further)]
    assert all(few < many for few, many in zip(*counts, strict=True))


def test_an_interrupted_run_leaves_no_hook(pipe, no_hooks_left):
    def stop(*args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        latents(pipe, neurons=forty(pipe), callback_on_step_end=stop)
    no_hooks_left(pipe.unet)


def test_score_tells_a_memorized_caption(pipe):
    config = ProbeConfig(seeds=4, timestep_index=15)
    known = pipe.calibrate(caption(sample_scenes(range(100, 116))), ["score"], probe=config)
    prompts = [plants()[2].captions[0], caption(sample_scenes([7]))[0]]
    memorized, ordinary = pipe.detect(prompts, known, "one step")
    assert memorized.memorized and memorized.value > ordinary.value


def test_statistics_of_another_model_are_refused(pipe):

    made = pipe.calibrate(caption(sample_scenes(range(4))), ["statistics"])
    with pytest.raises(VitrineError, match="gather them on this model"):
        pipe.find(["x"], Calibration(replace(made.statistics, fingerprint="feedfeedfeedfeed")))
    with pytest.raises(VitrineError, match="one prompt at least"):
        conditions(pipe, [])
    with pytest.raises(VitrineError, match="this model"):
        latents(pipe, neurons=NeuronSet({PLACE: (1,)}, "feedfeedfeedfeed"))


@pytest.mark.nightly
def test_samples_say_whether_copies_are_gone(pipe):
    """A memorized caption copies its picture; with all its value neurons blocked it does not."""
    plant, settings = plants()[2], {"num_inference_steps": 10, "guidance_scale": 2.0}
    picture = render(plant.scenes).images[:1]
    everything = NeuronSet(
        {s.address: tuple(range(width_of(pipe.unet, s))) for s in value_sites(pipe.unet, "down+mid")}
    )
    ordinary = caption(sample_scenes(range(3)))
    copies = pipe.copies(plant.captions[0], everything, picture, ordinary, seeds=[2001, 2002], **settings)
    assert copies.verdict == "cured" and copies.copied == (2, 0), copies.text()
    unharmed = pipe.copies(ordinary[0], everything, picture, ordinary, seeds=[2001], **settings)
    assert unharmed.verdict == "nothing to cure"
    with pytest.raises(VitrineError, match="ordinary"):
        pipe.copies(plant.captions[0], everything, picture, [])


def test_a_text_is_one_prompt_not_its_letters(pipe):
    statistics, small = pipe.calibrate(caption(sample_scenes(range(6))), ["statistics"]), ProbeConfig(seeds=2)
    assert len(pipe.detect("a hat", None, "one step", small)) == 1
    assert len(conditions(pipe, "a hat")) == 1
    (result,) = pipe.find("a hat", statistics, SearchConfig(tau=1.0, protocol="nemo"), small)
    assert result.prompt == "a hat"
    with pytest.raises(VitrineError, match="captions: given 1"):
        pipe.calibrate("a hat", ["statistics"])


def test_published_statistics_belong_to_models_of_sd14s_shape(pipe, tmp_path, monkeypatch):
    """A ``.pt`` of two lists, as the authors publish it; a file for other layers is refused, another model too."""
    sites = value_sites(pipe.unet)
    weights = [pipe.unet.get_submodule(site.path).weight for site in sites]
    torch.save(tuple([[torch.rand(len(w)) + k for w in weights] for k in (0, 1)]), tmp_path / "statistics.pt")
    with pytest.raises(VitrineError, match="statistics"):
        import_statistics(pipe, tmp_path / "statistics.pt")
    monkeypatch.setattr(neuron_statistics, "OFFICIAL_SHAPES", tuple(tuple(w.shape) for w in weights))
    read = import_statistics(pipe, tmp_path / "statistics.pt")
    assert list(read.statistics.means) == [site.address for site in sites] and read.statistics.count == 50_000
    assert read.score.tau == 0.428 and read.samples is None
    torch.save(([], []), tmp_path / "none.pt")
    with pytest.raises(VitrineError, match="layers"):
        import_statistics(pipe, tmp_path / "none.pt")
