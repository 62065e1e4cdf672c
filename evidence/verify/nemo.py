"""NeMo's score as a detector, on the authors' prompts (Hintersdorf et al., NeurIPS 2024, Appendix B.4)."""

from __future__ import annotations

import torch

from ...engine.nemo.blocked_copies import share_interval
from ..intervals import auroc, auroc_interval, true_positives, true_positives_interval
from .context import SETTINGS, Context
from .protocol import check
from .records import Estimate, Figure, Measured, Need, Published

PAPER = "Finding NeMo (Hintersdorf et al., NeurIPS 2024)"
REPOSITORY = "github.com/ml-research/localizing_memorization_in_diffusion_models"
MEMORIZED = Need(
    "memorized_laion_prompts.csv", "500 memorized prompts, columns Caption and type VM or TM",
    f"{REPOSITORY}, prompts/",
    "code MIT; the list comes from Wen et al., whose repository states none: do not pass it on",
    ("memorized_prompts.csv",),
)  # fmt: skip
ORDINARY = Need(
    "unmemorized_laion_prompts.csv", "500 prompts that are not memorized", f"{REPOSITORY}, prompts/",
    "code MIT; captions from LAION, none stated", ("ordinary_prompts.csv",),
)  # fmt: skip
SD14, DATA = "SD1.4", "500 memorized and 500 other LAION prompts"
VERBATIM, FPR = "VM", 0.01
_TABLE = (
    ("auroc", "AUROC of the score, all prompts", 0.98),
    ("tpr", "fraction of memorized prompts above 99 % of the others (TPR at 1 % FPR)", 0.876),
    ("accuracy", "accuracy at a score of 0.5", 0.942),
    ("auroc.vm", "AUROC, prompts that come back verbatim (VM)", 0.9964),
    ("tpr.vm", "TPR at 1 % FPR, VM", 0.9821),
    ("accuracy.vm", "accuracy at 0.5, VM", 0.9739),
)
PUBLISHED = tuple(
    Published(f"nemo.{key}", figure, value, None, SD14, DATA, "NeMo, Appendix B.4") for key, figure, value in _TABLE
)


def prepare(context: Context) -> Estimate:
    """Ten noises of every prompt, one forward each."""
    counts = [_count(context, need) for need in (MEMORIZED, ORDINARY)]
    seeds, rows = context.settings.detect.seeds, sum(counts) * context.settings.detect.seeds
    held = context.pace.rows_within(context.budget, 80) * context.pace.row
    return context.pace.estimate(rows, held, f"{counts[0]} + {counts[1]} prompts, {seeds} noises each")


def _count(context: Context, need: Need, published: int = 500) -> int:
    """Prompts that will be measured; the published number if the list is missing."""
    whole = published if context.path(need) is None else len(context.prompts(need)[0])
    return len(context.chosen(whole))


@check(
    "nemo.detection", paper=PAPER, families=("SD", "SDXL", "Flux"), needs=(MEMORIZED, ORDINARY, SETTINGS),
    published=PUBLISHED, prepare=prepare,
)  # fmt: skip
def detection(context: Context) -> Measured:
    """Scores of both lists, and how well they are separated."""
    (memorized, labels), (ordinary, _) = (context.prompts(need) for need in (MEMORIZED, ORDINARY))
    first, second = context.chosen(len(memorized)), context.chosen(len(ordinary))
    texts = [memorized[i] for i in first] + [ordinary[i] for i in second]
    config = context.settings.detect
    state = context.state("scores.safetensors", config.to_dict(), texts)
    bar = context.bar("nemo.detection")
    scores = context.nemo.detect(texts, None, "one step", config, bar, state, context.budget)
    values = torch.tensor([score.value for score in scores])
    positive, negative = values[: len(first)], values[len(first) :]
    figures = _figures(positive, negative, "")
    verbatim = positive[torch.tensor([labels[i] == VERBATIM for i in first])]
    if len(verbatim) > 1:
        figures |= _figures(verbatim, negative, ".vm")
    differs = [
        *context.subset_note(len(first), len(memorized), "memorized prompts"),
        *context.subset_note(len(second), len(ordinary), "other prompts"),
        *context.usual_notes("detect"),
    ]  # fmt: skip
    missing = (
        {} if len(verbatim) > 1 else {p.key: "fewer than two VM prompts among those measured" for p in PUBLISHED[3:]}
    )
    details = {"metric": scores[0].metric or context.nemo.probe(config=config).metric(context.nemo.latent_shape())}
    details |= {f"{name} scores": [round(float(q), 4) for q in v.quantile(torch.tensor([0.0, 0.5, 0.99, 1.0]))]
                for name, v in (("memorized", positive), ("other", negative))}  # fmt: skip
    return Measured(figures, tuple(differs), missing, details)


def _figures(positive: torch.Tensor, negative: torch.Tensor, ending: str) -> dict[str, Figure]:
    count = len(positive) + len(negative)
    right = torch.cat([positive > 0.5, negative <= 0.5]).float()
    whose = "VM prompts" if ending else "all prompts"
    values = {
        "auroc": (f"AUROC, {whose}", auroc(positive, negative), auroc_interval(positive, negative)),
        "tpr": (
            f"TPR at 1 % FPR, {whose}", true_positives(positive, negative, FPR),
            true_positives_interval(positive, negative, FPR),
        ),
        "accuracy": (
            f"accuracy at a score of 0.5, {whose}", float(right.mean()), share_interval(int(right.sum()), count),
        ),
    }  # fmt: skip
    return {f"nemo.{key}{ending}": Figure(what, round(value, 4), interval, count)
            for key, (what, value, interval) in values.items()}  # fmt: skip
