"""The copy check's claim: its people, and the published scores that NeMo's is compared with."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits import load_portraits
from vitrine.evidence.nemo.copy_claims import MEASURED, TUNING
from vitrine.evidence.nemo.guidance_difference import pull
from vitrine.evidence.nemo.lora_report_claims import judged

pytestmark = pytest.mark.usefixtures("few_draws")
SHAPE = (4, 16, 16)


def test_people_that_were_tuned_on_are_never_measured():
    assert not set(range(TUNING, TUNING + 100)) & set(range(MEASURED, MEASURED + 100))


@pytest.fixture(scope="module")
def portraits():
    return load_portraits()


def conditions(portraits, *texts):
    with torch.no_grad():
        return [Condition(row[None]) for row in portraits.encode(list(texts))]


def test_the_empty_prompt_does_not_pull(portraits):
    (empty,) = conditions(portraits, "")
    nothing = pull(Denoiser.from_diffusers(portraits.pipeline()), empty, empty, SHAPE, range(2))
    assert max(nothing.norm, nothing.sharpness) < 1e-4 and abs(nothing.cosine) < 1 and math.isfinite(nothing.anisotropy)


def test_norm_cosine_and_sharpness_against_their_formulas(portraits):
    denoiser = Denoiser.from_diffusers(portraits.pipeline())
    cond, empty = conditions(portraits, "a smiling tan face with bald head on blue", "")
    scores = pull(denoiser, cond, empty, SHAPE, [7], stride=1e-3)
    x, both = seeded_noise([7], SHAPE), Condition.batch([cond, empty])

    def eps(x, t):
        return portraits.unet(torch.cat([x, x]), torch.tensor(t), both.text).sample.chunk(2)

    with torch.no_grad():
        (c, u), (late_c, late_u) = eps(x, 981.0), eps(x, 41.0)
    cosine = torch.nn.functional.cosine_similarity(late_u, late_c - late_u, dim=1).mean()
    assert scores.norm == pytest.approx(float((c - u).norm()), rel=1e-4)
    assert scores.cosine == pytest.approx(float(cosine), abs=1e-4)
    assert scores.anisotropy == pytest.approx(scores.norm + 2 * scores.cosine, rel=1e-5)
    sigma = float(denoiser.schedule.scales(981.0)[1])

    def score(x):  # eps is minus sigma times the score
        c, u = eps(x, 981.0)
        return -(c - u) / sigma

    with torch.no_grad():
        d = score(x)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        _, along = torch.autograd.functional.jvp(score, x, d)
    assert scores.sharpness == pytest.approx(float(along.norm()), rel=0.02)


def test_the_reports_verdict_is_judged_and_its_scores_order_is_told():
    def row(copies, verdict, score):
        return {"copies": copies, "verdict": verdict, "score": score, "with portraits": score, "bare": 0.1 + copies}

    clean = {f"clean {i}": row(0.0, "fine", 0.3) for i in range(100)}
    copying = {f"copy {i}": row(1.0, "bad", 0.2) for i in range(20)}
    holds = judged(clean | copying, 4)
    assert holds.holds and holds.value == 0 and holds.arms[1].value == pytest.approx(1 / 6)
    few = judged(dict(list(clean.items())[:20]) | dict(list(copying.items())[:2]), 4)
    assert few.verdict == "partly" and not few.parts["surely fewer than as many verdicts at random"]
    missed = judged(clean | copying | {"missed": row(1.0, "fine", 0.9)}, 4)
    assert missed.verdict == "partly"
    order = holds.details["rank correlation with the fraction of copies, 95 %"]
    assert order["the score"][0] < 0 and not any("rank" in part for part in holds.parts)
