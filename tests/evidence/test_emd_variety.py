"""The collapsed student of the flow portraits, and the claim that its base gives it variety back."""

import pytest
import torch
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.emd import Base, FirstSteps, few_steps, mean_distance
from vitrine.engine.portraits import sample_scenes
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine.evidence.emd.flow_student import SAMPLING, collapsed_flow_student
from vitrine.evidence.emd.variety import STUDENT_ALONE, TEACHER, WITH_BASE, Drawn, open_captions
from vitrine.evidence.emd.variety_claims import measured
from vitrine.evidence.portraits.sampling import decode


@pytest.mark.nightly
def test_score_distillation_draws_seeds_together_and_the_base_apart():
    model, scenes, seeds = load_flow_portraits(), sample_scenes(range(7_310_000, 7_310_001)), list(range(8))
    before = {k: v.clone() for k, v in model.transformer.state_dict().items()}
    student = collapsed_flow_student(model, updates=20)
    after = model.transformer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(v, after[k]) for k, v in before.items())
    teacher = Denoiser.from_diffusers(model.transformer, model.scheduler)
    with torch.no_grad():
        cond = model.condition(model.encode(open_captions(scenes) * 8))
    z = seeded_noise(seeds, model.latent_shape)
    base = Base(teacher, cond, FirstSteps(1))
    ways = {
        STUDENT_ALONE: few_steps(student, z, cond, SAMPLING, seeds),
        WITH_BASE: few_steps(student, z, cond, SAMPLING, seeds, base),
        TEACHER: few_steps(teacher, z, cond, SAMPLING, seeds),
    }
    apart = {name: mean_distance(latents.flatten(1)) for name, latents in ways.items()}
    assert apart[STUDENT_ALONE] < 0.85 * apart[TEACHER] and apart[STUDENT_ALONE] < apart[WITH_BASE], apart
    pictures = {name: decode(model, latents)[None] for name, latents in ways.items()}
    rows, distances = measured(Drawn(scenes, pictures, dict.fromkeys(ways, 4)))
    assert all(len(d) == 1 and 0 < d[0] < 1 for d in distances.values())
    assert rows[TEACHER]["precision"] == rows[TEACHER]["recall"] == 1.0  # beside itself
