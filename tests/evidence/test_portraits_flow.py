"""The flow portraits: training resumes to the bit, and writes a FluxPipeline folder."""

import json
import shutil

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.families.packing import unpack
from vitrine.engine.jobs.run import NOTE
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.engine.portraits.flow import FLOW_WEIGHTS, build_flow_models, load_flow_portraits, standardise
from vitrine.engine.portraits.models import save_portraits
from vitrine.engine.runtime.progress import Interrupted
from vitrine.evidence.portraits.sampling import sample_latents
from vitrine.evidence.recipes.commands import main as recipe
from vitrine.evidence.recipes.flow import LATENTS, PICTURES, TRANSFORMER, main
from vitrine.evidence.recipes.phase import OutOfTime
from vitrine.evidence.recipes.settings import AdvancedFlowTrainConfig, FlowTrainConfig

TINY = {
    "pictures": 16,
    "vae_steps": 3,
    "flow_steps": 3,
    "device": "cpu",
    "advanced": AdvancedFlowTrainConfig(vae_batch=1, flow_batch=8, colourings=2, save_every_seconds=0.0),
}
FLAGS = "--pictures 16 --vae-steps 3 --flow-steps 3 --device cpu --vae-batch 1 --flow-batch 8"
FLAGS += " --colourings 2"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A run that was out of time after one step: its pictures are on disk."""
    folder = tmp_path_factory.mktemp("drawn")
    with pytest.raises(OutOfTime, match="vae: stopped at step 1 of 3"):
        main(FlowTrainConfig(out=str(folder), max_seconds=-1.0, **TINY))
    assert (folder / "vae" / "state.safetensors").is_file() and not list(folder.rglob("*.tmp"))
    return folder


@pytest.fixture(scope="module")
def finished(drawn, tmp_path_factory):
    """One run, never stopped, on the same pictures."""
    folder = tmp_path_factory.mktemp("run")
    for name in (PICTURES, NOTE):
        shutil.copy(drawn / name, folder)
    return main(FlowTrainConfig(out=str(folder), **TINY))


def weights(folder):
    model = load_flow_portraits(folder)
    parts = (model.transformer, model.text_encoder, model.vae)
    return {f"{i} {k}": v for i, part in enumerate(parts) for k, v in part.state_dict().items()}


def same(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.nightly
def test_runs_stopped_in_each_phase_end_in_the_same_weights(drawn, finished, capsys):
    """Out of time in the autoencoder, interrupted by the user in the transformer, then finished by the command."""

    def stop(name):
        def callback(step, total, preview=None):
            if name == TRANSFORMER and step == 2:
                raise Interrupted

        return callback

    with pytest.raises(Interrupted):
        main(FlowTrainConfig(out=str(drawn), **TINY), stop)
    assert not (drawn / PICTURES).exists() and (drawn / LATENTS).is_file(), "drawn for the autoencoder alone"
    assert recipe(["flow", "--out", str(drawn), *FLAGS.split()]) == 0
    assert "flow-portraits" in capsys.readouterr().out
    assert same(drawn / "flow-portraits", finished)


@pytest.mark.nightly
def test_a_finished_run_can_be_given_more_steps_and_stopped_again(drawn, finished, tmp_path):
    shutil.copytree(finished.parent, tmp_path / "run")
    more = FlowTrainConfig(out=str(tmp_path / "run"), **TINY | {"flow_steps": 5})
    with pytest.raises(OutOfTime, match="flow: stopped at step 4 of 5"):
        main(FlowTrainConfig.from_dict(more.to_dict() | {"max_seconds": -1.0}))
    unfinished = tmp_path / "run" / "unfinished"
    assert not same(unfinished, finished) and json.loads((unfinished / "training.json").read_text())["phases"]["flow"]


@pytest.mark.nightly
def test_the_pooled_vector_stays_unread_and_text_is_learned(finished):
    trained, fresh = load_flow_portraits(finished), build_flow_models()
    reader = trained.transformer.time_text_embed.text_embedder
    assert all(not p.any() for p in reader.parameters())
    for part in ("transformer", "text_encoder"):
        pairs = zip(getattr(trained, part).parameters(), getattr(fresh, part).parameters(), strict=True)
        assert any(not torch.equal(a, b.half().float()) for a, b in pairs), part


def test_standardised_latents_decode_to_the_same_pictures():
    vae = build_flow_models().vae
    pictures = render(sample_scenes([1, 2]), 128, details=True).images * 2 - 1
    mean, deviation = torch.linspace(-1, 1, 16), torch.linspace(0.5, 2, 16)
    with torch.no_grad():
        before = vae.encode(pictures).latent_dist
        wanted = vae.decode(before.mean).sample
        standardise(vae, mean, deviation)
        after = vae.encode(pictures).latent_dist
        found = vae.decode(after.mean).sample
    scaled = (before.mean - mean.view(-1, 1, 1)) / deviation.view(-1, 1, 1)
    assert torch.allclose(after.mean, scaled, atol=1e-5)
    assert torch.allclose(after.std, before.std / deviation.view(-1, 1, 1), rtol=1e-4)
    assert torch.allclose(found, wanted, atol=1e-4)


def test_the_autoencoder_begins_with_the_small_ones_coarse_levels():
    vae, small = build_flow_models().vae, load_portraits().vae
    for ours, theirs in (
        (vae.encoder.mid_block, small.encoder.mid_block),
        (vae.encoder.down_blocks[3], small.encoder.down_blocks[2]),
        (vae.decoder.up_blocks[0], small.decoder.up_blocks[0]),
    ):
        pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
        assert pairs and all(torch.equal(a, b) for a, b in pairs)


def test_our_sampler_is_the_stock_pipelines(tmp_path):
    """The same noise, Euler steps and guidance as FluxPipeline, whose folder layout survives a round trip in fp16."""
    model = build_flow_models()
    with torch.no_grad():
        for parameter in model.transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.manual_seed(len(parameter))))
    save_portraits(model, tmp_path / "model")
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(tmp_path / "model", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    prompt = "a smiling tan face with short black hair"
    how = {"height": 128, "width": 128, "max_sequence_length": 24, "num_inference_steps": 3, "output_type": "latent"}
    packed = pipe(prompt, negative_prompt="", true_cfg_scale=3.0, generator=torch.manual_seed(7), **how).images
    ours = load_flow_portraits(tmp_path / "model")
    found = sample_latents(ours, [prompt], [7], steps=3, guidance=3.0)
    assert torch.allclose(found, unpack(packed, found), atol=1e-5)


def test_details_change_colours_but_not_what_is_where():
    scenes = sample_scenes(range(12))
    plain, fine = render(scenes, 128), render(scenes, 128, details=True)
    assert torch.equal(plain.parts, fine.parts)
    assert torch.equal(plain.keypoints.nan_to_num(-1), fine.keypoints.nan_to_num(-1))

    def texture(images):
        return (images[..., 1:] - images[..., :-1]).abs().mean()

    assert texture(fine.images) > 1.15 * texture(plain.images)
    assert (plain.images - fine.images).abs().mean() < 0.06, "a face keeps its colours: captions stay true"
    flipped = render(scenes[:2], 128, details=True, flip=True).images
    assert flipped.shape == (2, 3, 128, 128) and bool(flipped.isfinite().all())


def test_bad_configs_and_folders_are_refused(tmp_path):
    with pytest.raises(VitrineError, match="share"):
        AdvancedFlowTrainConfig(plant_share=1.0)
    with pytest.raises(VitrineError, match="count"):
        AdvancedFlowTrainConfig(flow_batch=0)
    with pytest.raises(VitrineError, match="count"):
        FlowTrainConfig(pictures=0)
    with pytest.raises(VitrineError, match="model_index"):
        load_flow_portraits(tmp_path)
    with pytest.raises(VitrineError, match="64 px model"):
        load_portraits(FLOW_WEIGHTS)
