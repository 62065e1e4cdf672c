"""``vitrine verify`` within its budget: the process's real peak while prompts are scored and sampled."""

import json
from dataclasses import replace

from vitrine.engine.portraits.models import WEIGHTS
from vitrine.engine.runtime.progress import silent
from vitrine.evidence.verify.context import Asked, Context
from vitrine.evidence.verify.embedded import SETTINGS, write_data
from vitrine.evidence.verify.judge import judge_of
from vitrine.evidence.verify.nemo import detection
from vitrine.evidence.verify.samples import Samples
from vitrine.evidence.verify.settings import FILE
from vitrine_tests.peak import MiB, bounded, held, needs_peak


@needs_peak
def test_scores_and_samples_of_a_verification(tmp_path):
    """48 samples a prompt; all of them at once take several times the budget, which is measured too."""
    data, budget = write_data("portraits", tmp_path / "data"), 24 * MiB
    settings = SETTINGS["portraits"]
    many = replace(settings, seeds=48, steps=1)
    (data / FILE).write_text(json.dumps(many.to_dict()))

    def peak_within(memory, name):
        asked = Asked(str(WEIGHTS), data, subset=2, memory=str(memory), out=tmp_path / name)
        context = Context(asked, lambda label: silent)
        judge, _ = judge_of(context), (context.pace, context.weights)
        samples = Samples(context, judge, ["a face", "a hat"], "untouched")
        return held(lambda: detection(context)), held(samples.all)

    peak_within(budget, "warm")
    # What one of two runs took and the other did not was the process's, such as a kernel's first use of its scratch.
    scored, sampled = map(min, zip(*(peak_within(budget, f"bounded {k}") for k in (1, 2)), strict=True))
    bounded("a verification's samples", sampled, budget)
    bounded("a verification's scores", scored, budget)
    _, free = peak_within(4096 * MiB, "free")
    assert free > 2 * budget, f"{free / MiB:.1f} MiB"
