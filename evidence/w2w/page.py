"""The W2W section of ``vitrine demo``: sampled people, a slider, edits together and late, one picture inverted."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.progress import Progress, silent


def section(report: Any, progress: Progress = silent) -> None:
    """Add the section; about a minute on two cores."""
    from .world import Studio

    studio = Studio.open()
    report.add_heading("weights2weights: a space of models")
    report.add_paragraph(
        f"{studio.space.count} LoRAs, one for each of as many people, became a space of {studio.space.dimension} "
        "principal components. A person is a row of numbers; the prompts below say the surroundings only."
    )
    steps = (_samples, _sweep, _together, _late, _inversion)
    for i, step in enumerate(steps):
        step(report, studio)
        progress(i + 1, len(steps), None)


def _row(report: Any, images: torch.Tensor, titles: list[str], width: int = 100) -> None:
    from ..portraits.page import to_pil

    report.add_images(list(zip(to_pil(images), titles, strict=True)), width=width)


def _people(studio: Any, seeds: range) -> torch.Tensor:
    from ...engine.w2w.sampling import sample
    from .measures import PEOPLE

    return sample(studio.space, seeds, PEOPLE)


def _samples(report: Any, studio: Any) -> None:
    from ...engine.charts import line_chart
    from ...engine.w2w.sampling import nearest
    from .measures import distances, distributions

    rows = _people(studio, range(8))
    report.add_paragraph("Four sampled people, four pictures each, and the training person nearest to each (cosine).")
    near = [n[0] for n in nearest(studio.space, rows[:4])]
    known = studio.draw(studio.space.coefficients[[n.index for n in near]], 1)
    drawn = studio.draw(rows, 4)
    for i, images in enumerate(drawn[:4]):
        told = [f"sampled, seed {i}"] * 4 + [f"{near[i].name}, {near[i].cosine:.2f}"]
        _row(report, torch.cat([images, known[i]]), told)
    report.add_paragraph("How alike the faces of two pictures are, for eight such people: one person is one person.")
    lines = distributions(*distances(studio.read(drawn)[0]))
    chart = line_chart(lines, "Identity distance of two pictures", "cosine distance", "share below")
    report.add_images([(chart, "")], width=560)


def _sweep(report: Any, studio: Any) -> None:
    from ...engine.w2w.directions import named

    report.add_paragraph("One slider on one person, in standard deviations of the training models.")
    person = _people(studio, range(1, 2))
    for label in ("glasses", "long hair", "pale skin"):
        d = named(studio.space, label)
        strengths = (0.0, 1.0, 2.0, 3.0, 4.0)
        images = studio.draw(torch.cat([person + s * d for s in strengths]), 1)[:, 0]
        _row(report, images, [f"{label} {s:+.0f}" for s in strengths])


def _together(report: Any, studio: Any) -> None:
    from ...engine.w2w.editing import edit

    person = _people(studio, range(1, 2))
    report.add_paragraph("Edits add up, in any order.")
    steps = [{}, {"glasses": 3.5}, {"glasses": 3.5, "beard": 3.5}, {"glasses": 3.5, "beard": 3.5, "pale skin": 3.0}]
    images = studio.draw(torch.cat([edit(studio.space, person, s) for s in steps]), 1)[:, 0]
    _row(report, images, [", ".join(s) or "unedited" for s in steps])


def _late(report: Any, studio: Any) -> None:
    from ...engine.w2w.editing import edit

    person = _people(studio, range(1, 2))
    after = edit(studio.space, person, {"beard": 3.5, "glasses": 3.5})
    report.add_paragraph("The same edit, injected from a timestep on: the later, the more of the first picture stays.")
    starts = (-1, 300, 500, 700, 850, 1000)
    images = [studio.draw(person, 1, late=after, start=float(s))[0] for s in starts]
    _row(report, torch.cat(images), [f"from t = {s}" if s >= 0 else "never" for s in starts])


def _inversion(report: Any, studio: Any) -> None:
    from ...engine.denoiser import Denoiser
    from ...engine.portraits.identities import FIRST_IDENTITY
    from .measures import inverted, pictures_of

    who = [FIRST_IDENTITY + 5000 + i for i in range(3)]
    images, told, _ = pictures_of(who)
    rows, seconds = inverted(studio, Denoiser.from_diffusers(studio.portraits.pipeline()), images, told)
    report.add_paragraph(
        f"One picture of somebody who is in no space (left), and the person found elsewhere; {seconds:.0f} s "
        "each. `vitrine reproduce w2w.inversion` compares with trained LoRAs."
    )
    drawn = studio.draw(rows, 4)
    for given, found in zip(images, drawn, strict=True):
        _row(report, torch.cat([given[None], found]), ["the one picture", *["found"] * 4])
