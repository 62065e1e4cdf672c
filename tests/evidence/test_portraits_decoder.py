"""The flow model's decoder is trained on: to the bit, from what the model ships, with all else as it was."""

import json
import shutil

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine.evidence.recipes.commands import main as recipe
from vitrine.evidence.recipes.decoder import TOKENS, Drawing, PatchJudge, main
from vitrine.evidence.recipes.flow import PICTURES
from vitrine.evidence.recipes.phase import OutOfTime
from vitrine.evidence.recipes.settings import AdvancedDecoderTrainConfig, DecoderTrainConfig

TINY = {
    "pictures": 4,
    "steps": 2,
    "device": "cpu",
    "advanced": AdvancedDecoderTrainConfig(decoder_batch=2, colourings=1, save_every_seconds=0.0),
}
FLAGS = "--pictures 4 --steps 2 --device cpu --decoder-batch 2 --colourings 1 --save-every-seconds 0"


def weights(folder):
    model = load_flow_portraits(folder)
    parts = (model.transformer, model.text_encoder, model.vae)
    return {f"{i} {k}": v for i, part in enumerate(parts) for k, v in part.state_dict().items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return main(DecoderTrainConfig(out=str(tmp_path_factory.mktemp("whole")), **TINY))


@pytest.mark.nightly
def test_a_stopped_run_ends_in_the_same_weights(finished, tmp_path):
    shutil.copy(finished.parent / PICTURES, tmp_path)
    with pytest.raises(OutOfTime, match="decoder: stopped at step 1 of 2"):
        main(DecoderTrainConfig(out=str(tmp_path), max_seconds=-1.0, **TINY))
    assert recipe(["decoder", "--out", str(tmp_path), *FLAGS.split()]) == 0
    whole, resumed = weights(finished), weights(tmp_path / "flow-portraits")
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[k], resumed[k]) for k in whole)


@pytest.mark.nightly
def test_a_folder_of_other_settings_is_refused(finished, tmp_path):
    """Latents of other pictures would be taught as these pictures' own."""
    shutil.copy(finished.parent / TOKENS, tmp_path)
    with pytest.raises(VitrineError, match="given tokens.safetensors, begun with other pictures"):
        main(DecoderTrainConfig(out=str(tmp_path), **TINY | {"pictures": 5}))
    with pytest.raises(VitrineError, match="positive counts"):
        AdvancedDecoderTrainConfig(decoder_batch=0)


@pytest.mark.nightly
def test_only_the_decoder_changes(finished):
    before, after = weights(None), weights(finished)
    assert before.keys() == after.keys()
    changed = {k.split(".")[0] for k in before if not torch.equal(before[k], after[k])}
    assert changed == {"2 decoder", "2 post_quant_conv"}
    record = json.loads((finished / "training.json").read_text())
    assert record["phases"]["decoder"]["steps"] == 2 and record["settings"]["decoder_batch"] == 2


def test_decoder_and_judge_learn_from_their_own_losses_alone():
    """The sum's gradients are those of each loss by itself: the judge's score moves the decoder, and not the judge."""
    drawing = Drawing(load_flow_portraits()).eval()  # spectral norms stand still
    g = torch.Generator().manual_seed(0)
    latents, target = torch.randn(2, 16, 16, 16, generator=g), torch.rand(2, 3, 128, 128, generator=g) * 2 - 1
    drawing.losses(latents, target, DecoderTrainConfig()).backward()
    both = [p.grad.clone() for p in drawing.judge.parameters()]
    drawing.zero_grad()
    drawn = drawing(latents).detach()
    (real, _), (fake, _) = drawing.judge(target), drawing.judge(drawn)
    ((1 - real).clamp(min=0).mean() + (1 + fake).clamp(min=0).mean()).backward()
    pairs = list(zip(both, drawing.judge.parameters(), strict=True))
    assert all(torch.allclose(a, p.grad, atol=1e-5) for a, p in pairs) and any(p.grad.any() for _, p in pairs)
    assert all(p.grad is None for p in drawing.decoder.parameters())


def test_the_judge_sees_patches():
    score, features = PatchJudge()(torch.zeros(1, 3, 128, 128))
    assert score.shape == (1, 1, 16, 16) and len(features) == 4
