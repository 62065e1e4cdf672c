"""The W2W section of ``vitrine demo``: sampled people, sliders, edits together and late, pictures inverted."""

from __future__ import annotations

import torch

from ...engine.io.html_page import Report
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.edit.coefficient_sampling import nearest, sample
from ...engine.w2w.edit.editing import edit
from ...engine.w2w.space.directions import direction_named
from .likeness import Sitters
from .measures import PEOPLE, distances, distributions
from .people import Studio


def section(report: Report, progress: Progress = silent) -> None:
    """Add the section; about a minute on two cores."""
    studio = Studio.open()
    report.add_paragraph(
        f"{studio.space.count} LoRAs, one for each of as many people, became a space of {studio.space.dimension} "
        "principal components. A person is a list of numbers; the prompts below say the surroundings only."
    )
    steps = (_samples, _sweep, _together, _late, _inversion)
    for i, step in enumerate(steps):
        step(report, studio)
        progress(i + 1, len(steps), None)


def _row(report: Report, images: torch.Tensor, titles: list[str], width: int = 100) -> None:
    from ..portraits.page import to_pil

    report.add_images(list(zip(to_pil(images), titles, strict=True)), width=width)


def _people(studio: Studio, seeds: range) -> torch.Tensor:
    return sample(studio.space, seeds, PEOPLE)


def _samples(report: Report, studio: Studio) -> None:
    from ..charts import line_chart

    people = _people(studio, range(8))
    report.add_paragraph("Four sampled people, four pictures each, and the training person nearest to each (cosine).")
    near = [n[0] for n in nearest(studio.space, people[:4])]
    known = studio.draw(studio.space.coefficients[[n.index for n in near]], 1)
    pictures = studio.draw(people, 4)
    for i, images in enumerate(pictures[:4]):
        titles = [f"sampled, seed {i}"] * 4 + [f"{near[i].name}, {near[i].cosine:.2f}"]
        _row(report, torch.cat([images, known[i]]), titles)
    report.add_paragraph("How alike the faces of two pictures are, for eight such people: one person is one person.")
    lines = distributions(*distances(studio.read(pictures)[0]))
    chart = line_chart(lines, "Identity distance of two pictures", "cosine distance", "share below")
    report.add_images([(chart, "")], width=560)


def _sweep(report: Report, studio: Studio) -> None:
    report.add_paragraph("One slider on one person, in standard deviations of the training models.")
    person = _people(studio, range(1, 2))
    for label in ("glasses", "long hair"):
        d = direction_named(studio.space, label)
        strengths = (0.0, 1.0, 2.0, 3.0, 4.0)
        images = studio.draw(torch.cat([person + s * d for s in strengths]), 1)[:, 0]
        _row(report, images, [f"{label} {s:+.0f}" for s in strengths])


def _together(report: Report, studio: Studio) -> None:
    person = _people(studio, range(1, 2))
    report.add_paragraph("Edits add up, in any order.")
    steps = [{}, {"glasses": 3.5}, {"glasses": 3.5, "beard": 3.5}, {"glasses": 3.5, "beard": 3.5, "pale skin": 3.0}]
    images = studio.draw(torch.cat([edit(studio.space, person, s) for s in steps]), 1)[:, 0]
    _row(report, images, [", ".join(s) or "unedited" for s in steps])


def _late(report: Report, studio: Studio) -> None:
    person = _people(studio, range(1, 2))
    after = edit(studio.space, person, {"beard": 3.5, "glasses": 3.5})
    report.add_paragraph("The same edit, injected from a timestep on: the later, the more of the first picture stays.")
    starts = (-1, 300, 600, 850, 1000)
    images = [studio.draw(person, 1, late=after, start=float(s))[0] for s in starts]
    _row(report, torch.cat(images), [f"from t = {s}" if s >= 0 else "never" for s in starts])


def _inversion(report: Report, studio: Studio) -> None:
    sitters = Sitters.open(studio, 1)
    coefficients, seconds = sitters.inverted()
    report.add_paragraph(
        f"One picture of somebody who is in no space (left), that person in other surroundings, and the mean "
        f"model, which is the baseline (right); {seconds:.0f} s each."
    )
    mean = studio.draw(torch.zeros(1, studio.space.dimension), 1)[0]
    for image, drawn in zip(sitters.images, studio.draw(coefficients, 4), strict=True):
        row = torch.cat([image[None], drawn, mean])
        _row(report, row, ["the one picture", *["found"] * 4, "the mean model"])
