"""Altered copies: each kind is found in pictures that tuned nothing, aligned, and other pictures are not copies."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from vitrine.engine.copies.altered import KINDS, AlteredIndex, altered_words
from vitrine.engine.copies.nearest import LENGTH, PictureIndex, distances, thumbnails
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.table_on_disk import RowFile
from vitrine.engine.nemo.blocked_copies import THIRD, share_interval
from vitrine.engine.portraits import render, sample_scenes
from vitrine.evidence.portraits.identities import FIRST_IDENTITY, training_pictures

PAGE = Path(__file__).parents[3] / "docs/verdicts.md"


def cropped(pictures, part, top, left):
    side = pictures.shape[-1]
    kept = round(side * part)
    y, x = (round((side - kept) * at) for at in (top, left))
    window = pictures[..., y : y + kept, x : x + kept]
    return F.interpolate(window, (side, side), mode="bilinear", align_corners=False, antialias=True)


def shifted(pictures, down, right):
    """Moved by sixteenths of the side; the border is mirrored."""
    side = pictures.shape[-1]
    step = side // 16
    padded = F.pad(pictures, (step,) * 4, mode="reflect")
    y, x = step - down * step, step - right * step
    return padded[..., y : y + side, x : x + side]


ALTERED = {
    "unaltered": lambda x: x,
    "mirrored": lambda x: x.flip(-1),
    "cropped to 90 %": lambda x: cropped(x, 0.9, 0, 1),
    "cropped to 80 %": lambda x: cropped(x, 0.8, 0.5, 0.5),
    "mirrored and cropped to 85 %": lambda x: cropped(x, 0.85, 0.3, 0.6).flip(-1),
    "shifted by a sixteenth": lambda x: shifted(x, 1, -1),
    "recoloured: grey": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "recoloured: warmer": lambda x: (x * torch.tensor([1.15, 1.0, 0.75])[:, None, None] + 0.03).clamp(0, 1),
    "recoloured: hue": lambda x: x[:, [1, 2, 0]],
}
MOVED = ("cropped", "shifted")


def scenes(first, count):
    return render(sample_scenes(range(first, first + count))).images


def people(first, count, each):
    return torch.cat([training_pictures(FIRST_IDENTITY + first + i, each)[0] for i in range(count)])


def index_of(pictures, usual):
    return AlteredIndex(lambda: [(0, pictures)], usual)


@pytest.fixture(scope="module")
def pictures():
    return scenes(5_300_000, 12)


@pytest.fixture(scope="module")
def usual():
    return scenes(8_600_000, 16)


@pytest.mark.parametrize("name", [name for name in ALTERED if name != "unaltered"])
def test_each_kind_is_found_and_aligned_where_the_rule_of_pixels_sees_less(pictures, usual, name):
    samples = thumbnails(ALTERED[name](pictures))
    assert float((samples - pictures).abs().mean()) > 0.01, "the alteration has an effect"
    near = index_of(pictures, usual).nearest(samples)
    right = (near.ratios < THIRD) & (near.numbers == torch.arange(len(pictures)))
    plain = distances(samples, pictures).diagonal() / distances(usual, pictures).median(0).values
    assert int(right.sum()) >= 9 and int(right.sum()) > int((plain < THIRD).sum())
    kinds = [KINDS[k] for k in near.kinds[right].tolist()]
    moved = any(word in name for word in MOVED)
    kind = "cropped or shifted" if moved else "recoloured" if "recoloured" in name else "mirrored"
    assert kinds.count(kind) >= 0.8 * len(kinds)
    left, before = ((each - samples)[right].square().mean((1, 2, 3)).sqrt() for each in (near.aligned, pictures))
    assert float(left.median()) < 0.5 * float(before.median())


def test_other_pictures_are_no_copies_and_a_plain_sample_is_none(pictures, usual):
    index = index_of(pictures, usual)
    assert int((index.nearest(scenes(5_400_000, 60)).ratios < THIRD).sum()) <= 1
    plain = torch.full((1, 3, 64, 64), 0.4)
    assert float(index.nearest(plain).ratios) > THIRD
    grey = index_of(torch.cat([plain, pictures]), usual).nearest(pictures[:2])
    assert bool(grey.ratios.isfinite().all())


def test_parts_of_the_pictures_give_what_all_of_them_give(pictures, usual):
    samples = thumbnails(torch.cat([ALTERED["mirrored"](pictures[:3]), ALTERED["recoloured: hue"](pictures[3:6])]))
    whole = index_of(pictures, usual).nearest(samples)
    split = AlteredIndex(lambda: [(0, pictures[:4]), (4, pictures[4:])], usual)
    for _ in range(2):  # what is usual is kept
        parts = split.nearest(samples)
        assert torch.allclose(parts.ratios, whole.ratios, atol=1e-5) and torch.equal(parts.numbers, whole.numbers)


def test_the_check_counts_them_says_how_they_are_altered_and_leaves_the_others_as_they_were(pictures, usual, tmp_path):
    with RowFile(tmp_path, (12, LENGTH), torch.float16) as table:
        table.write(0, pictures.flatten(1))
        index = PictureIndex(table, usual)
        samples = torch.stack([pictures[0], pictures[1].flip(-1), scenes(5_500_000, 1)[0]])
        near = index.nearest(samples)
    assert near.copied.tolist() == [True, True, False] and near.numbers[:2].tolist() == [0, 1]
    assert [KINDS[k] for k in near.kinds] == ["unaltered", "mirrored", "unaltered"]
    assert float(near.similar[1]) > 0.99 and float((near.maps[1] < THIRD).float().mean()) > 0.5
    plain = distances(samples, pictures) / distances(usual, pictures).median(0).values
    assert float(near.ratios[2]) == pytest.approx(float(plain[2].min()), abs=1e-3)
    assert altered_words(near.kinds[near.copied]) == "1 mirrored"


def test_training_pictures_among_the_usual_samples_are_left_out(pictures, usual, tmp_path):
    others = scenes(5_400_000, 12)
    with RowFile(tmp_path, (12, LENGTH), torch.float16) as table:
        table.write(0, pictures.flatten(1))
        alone, mixed = (PictureIndex(table, rows) for rows in (usual, torch.cat([pictures, usual])))
        wrong = distances(torch.cat([pictures, usual]), pictures).median(0).values
        assert float((wrong - distances(usual, pictures).median(0).values).abs().max()) > 0.01, "they would count"
        assert torch.equal(mixed.usual, usual) and mixed.level == alone.level
        assert torch.equal(mixed.nearest(others).ratios, alone.nearest(others).ratios)
        with pytest.raises(VitrineError, match="usual samples: given 12 training pictures"):
            PictureIndex(table, pictures)


def found_of(sets, usual, others):
    """Alteration -> (copies by the rule of pixels, by both rules, of), and false alarms the same."""
    counts = {name: [0, 0, 0] for name in (*ALTERED, "another picture")}
    for pictures in sets:
        levels, index = distances(usual, pictures).median(0).values, index_of(pictures, usual)
        queries = {name: alter(pictures) for name, alter in ALTERED.items()} | {"another picture": others}
        for name, samples in queries.items():
            plain = (distances(thumbnails(samples), pictures) / levels).min(1).values < THIRD
            near = index.nearest(thumbnails(samples))
            copied = near.ratios < THIRD
            if name in ALTERED:
                copied &= near.numbers == torch.arange(len(pictures))
            for i, number in enumerate((plain, plain | copied, torch.ones(len(samples)))):
                counts[name][i] += int(number.sum())
    return counts


@pytest.mark.nightly
def test_the_tutorials_table_of_alterations():
    """Pictures of people and scenes on which nothing was chosen; written down in the tutorial."""
    measured = {
        "people": found_of([people(900 + i, 1, 16) for i in range(4)], scenes(8_600_000, 16), people(950, 40, 4)),
        "scenes": found_of(
            [scenes(5_000_000 + 1000 * i, 48) for i in range(2)], scenes(8_700_000, 16), scenes(5_100_000, 160)
        ),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name in (*ALTERED, "another picture"):
        cells = [name if name in ALTERED else "another picture (false alarm)"]
        for counts in measured.values():
            before, now, of = counts[name]
            cells += [str(before), f"{now} of {of} ({' to '.join(map(str, share_interval(now, of)))})"]
        assert "| " + " | ".join(cells) + " |" in text
    assert measured["people"]["another picture"][1] == measured["people"]["another picture"][0]
