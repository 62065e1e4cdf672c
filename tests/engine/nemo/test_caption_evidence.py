"""How much of its caption a picture shows, as a real network sees it."""

import pytest
import torch
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.nemo.caption_evidence import NOISES, caption_evidence
from vitrine.engine.portraits import load_portraits, sample_scenes
from vitrine.engine.portraits.captions import caption
from vitrine.engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits
from vitrine.evidence.w2w.people import latents_of


@pytest.fixture(scope="module", params=["UNet", "transformer"])
def model(request):
    return load_portraits() if request.param == "UNet" else load_flow_portraits(FLOW_WEIGHTS)


@torch.no_grad()
def test_a_small_thing_that_no_longer_fits_is_seen(model):
    """Mouths, which the distance of two latents hardly shows."""
    smiling = sample_scenes(range(71_000, 71_012)).with_attributes(mouth="smiling")
    frowning = smiling.with_attributes(mouth="frowning")
    wanted, other = caption(smiling), caption(frowning)
    assert all(a != b for a, b in zip(wanted, other, strict=True))
    latents = [latents_of(model, model.draw(scenes)) for scenes in (smiling, frowning)]
    conds = [model.condition(model.encode([text])) for text in wanted]
    empty = model.condition(model.encode([""]))
    counts = []
    denoiser = Denoiser.from_diffusers(model)
    fits, not_quite = (caption_evidence(denoiser, x, conds, empty, 7, counts.append) for x in latents)
    assert fits.mean() > 0 and not_quite.mean() < 0.9 * fits.mean()
    assert (not_quite < fits).float().mean() > 0.8
    assert sum(counts) == 2 * (2 * NOISES * len(wanted)) and max(counts) <= 14
    alone = caption_evidence(denoiser, latents[0][3:4], conds[3:4], empty)
    assert torch.allclose(alone, fits[3:4], atol=1e-5), "rows of a batch do not meet"
