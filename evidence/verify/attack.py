"""What blocking leaves memorized: DoRI's optimised embedding against NeMo's neurons, sampled and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ...engine.nemo import adversarial_embedding
from ...engine.nemo.blocked_copies import share_interval
from ...engine.pipelines.nemo_jobs import probe_of
from ...engine.pipelines.nemo_prompts import conditions, latent_shape, latents_of
from .blocking import NEEDS, READS, REMEDIES, WORDS, median_figure, remedies, usual_samples
from .context import Context
from .judge import Judge, judge_of
from .nemo import MEMORIZED, ROWS_OF_A_SEARCH, SD14, neurons_of, verbatim_rows
from .protocol import check
from .records import Estimate, Figure, Measured, Published
from .samples import ORIGINALS, Samples, originals

PAPER = "Finding Dori (Kowalczuk, Hintersdorf, Struppek et al., ICML 2026), on NeMo"
ATTACKED = WORDS | {"attacked": "NeMo's neurons blocked, embedding optimised"}
_NOTE = (
    "DoRI's memorization rate is read as the fraction of prompts of which any sample is a copy (SSCD above 0.7, NeMo's "
    "rule for VM prompts). Its figures were taken from notes on the paper, whose own text was not at hand."
)
_TABLE = (("untouched", 0.98, 0.90, None), ("blocked", 0.20, 0.33, 0.18), ("attacked", 0.99, 0.91, None))
PUBLISHED = tuple(
    published
    for name, rate, similarity, spread in _TABLE
    for published in (
        Published(f"attack.sscd.rate.{name}", f"memorization rate, {ATTACKED[name]}", rate, None, SD14, "VM prompts",
                  "DoRI", _NOTE),
        Published(f"attack.sscd.orig.{name}", f"SSCD to the training picture, {ATTACKED[name]}", similarity, spread,
                  SD14, "VM prompts", "DoRI", _NOTE),
    )
)  # fmt: skip


def prepare(context: Context) -> Estimate:
    """A search, an attack (three times a forward's work) and three kinds of samples for each prompt."""
    settings, pace = context.settings, context.pace
    count = len(verbatim_rows(context)[0]) if context.path(MEMORIZED) else len(context.chosen(112))
    attack = 3 * settings.attack.steps * settings.attack.batch
    pictures = count * 3 * settings.seeds + settings.usual
    why = (
        f"{count} prompts: {ROWS_OF_A_SEARCH} evaluations for search, samples as in nemo.blocking, {attack} for attacks"
    )
    return pace.sampling(count * (ROWS_OF_A_SEARCH + attack), pictures, settings.steps, context.budget, why)


@check(
    "nemo.attack",
    paper=PAPER,
    families=("SD",),
    needs=tuple(replace(need, optional=False) if need is ORIGINALS else need for need in NEEDS),
    published=PUBLISHED,
    prepare=prepare,
)
def attack(context: Context) -> Measured:
    """Copies by the prompt, with its neurons blocked, and under the optimised embedding."""
    judge = judge_of(context)
    rows, prompts, whole = verbatim_rows(context)
    usual = usual_samples(context, judge)
    sets, differs = neurons_of(context, prompts)
    pictures = originals(context, rows)
    made = remedies(context, judge, prompts, sets)
    there = [i for i, row in enumerate(rows) if row in pictures]
    samples = {name: made[name].all()[0][there] for name in REMEDIES[:2]}
    targets, known = [pictures[rows[i]] for i in there], [sets[i] for i in there]
    probe, settings = probe_of(context.nemo, "all"), context.settings

    def attacked(row: int) -> Mapping[str, Any]:
        """Under the embedding optimised for a picture while its neurons are blocked."""
        height, width = (context.nemo.vae_scale_factor * side for side in latent_shape(context.nemo)[1:])
        squeezed = F.interpolate(targets[row], (height, width), mode="bilinear", antialias=True).clamp(0, 1)
        (cond,) = conditions(context.nemo, prompts[there[row]])
        latents = latents_of(context.nemo, squeezed)
        for parameter in context.network.parameters():
            parameter.requires_grad_(False)
        bar = context.bar("attack")
        called = adversarial_embedding(probe.denoiser, cond, latents, known[row], settings.attack, progress=bar)
        assert called.text is not None
        return {"neurons": known[row], "prompt_embeds": called.text}

    facts = [
        settings.attack.to_dict(),
        [sorted((a, list(n)) for a, n in s.neurons.items()) for s in known],
        [round(float(t.double().sum()), 6) for t in targets],
    ]
    texts = [prompts[i] for i in there]
    samples["attacked"] = Samples(context, judge, texts, "attacked", facts, attacked).all()[0]
    references = [judge.describe(target) for target in targets]
    figures: dict[str, Figure] = {}
    for name, described in samples.items():
        pairs = zip(described, references, strict=True)
        figures |= _figures(judge, name, torch.stack([judge.similarity(s, r, usual) for s, r in pairs]))
    differs = [*context.subset_note(len(rows), whole, "VM prompts"), *differs, *context.usual_notes(*READS, "attack")]
    if len(there) < len(rows):
        differs.append(f"{len(rows) - len(there)} of {len(rows)} prompts left out: no readable training picture")
    missing = {p.key: "pixels judged: name SSCD's file with --sscd" for p in PUBLISHED if p.key not in figures}
    return Measured(figures, tuple(differs), missing, {"judge": judge.name, "a copy is above": round(judge.level, 4)})


def _figures(judge: Judge, name: str, table: torch.Tensor) -> dict[str, Figure]:
    """Rate and similarity of (N, S)."""
    back = (table > judge.level).any(1)
    rate = Figure(
        f"fraction of prompts of which any sample copies ({judge.key}), {ATTACKED[name]}",
        round(float(back.float().mean()), 4),
        share_interval(int(back.sum()), len(back)),
        len(back),
    )
    similarity = median_figure(f"{judge.name}, to the training picture, {ATTACKED[name]}", table.median(1).values)
    return {f"attack.{judge.key}.rate.{name}": rate, f"attack.{judge.key}.orig.{name}": similarity}
