"""The map of a space: the layout, what the space's file keeps of it, the page and the picture."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from vitrine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import (
    DeltaSpace,
    at_place,
    load_space,
    map_of,
    map_picture,
    neighbours_of,
    place_of,
    with_directions,
    with_map,
    write_lora,
)
from vitrine.engine.w2w.space.map_layout import neighbours_kept
from vitrine_tests.engine.small_loras import lora


@pytest.fixture(scope="module")
def people():
    return load_space(PEOPLE_SPACE)


def test_neighbours_stay_neighbours(people):
    """Far above chance, and better than the first two components."""
    by_neighbours, by_components = (map_of(people, method=method) for method in ("neighbours", "components"))
    assert by_neighbours.kept > 0.5 > by_components.kept > 5 * by_components.chance
    assert by_neighbours.coordinates.abs().max() == 1 and by_neighbours.coordinates.shape == (people.count, 2)
    assert torch.equal(map_of(people, method="neighbours").coordinates, by_neighbours.coordinates)
    assert set(by_neighbours.labels) == set(people.directions)


def test_the_share_of_neighbours_by_hand():
    rows = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    places = torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
    near = [
        np.argsort(((p[:, None] - p[None]).norm(dim=2) + 1e9 * torch.eye(30)).numpy(), 1)[:, :4] for p in (rows, places)
    ]
    by_hand = np.mean([len(set(a) & set(b)) / 4 for a, b in zip(*near, strict=True)])
    assert neighbours_kept(rows, places, 4) == pytest.approx(by_hand) and neighbours_kept(rows, rows, 4) == 1


def test_a_model_dragged_over_the_map(people):
    """At its own place it is itself; it takes over what people have where it is dragged, and no step is a jump."""
    chart = map_of(people, method="components")
    person = 0.7 * people.coefficients[3] + 0.5 * people.coefficients[8]
    home, there = place_of(people, chart, person), torch.tensor([-0.6, -0.4])
    assert torch.equal(at_place(people, chart, person, tuple(home.tolist())), person)
    shares = torch.arange(401) / 400
    path = [at_place(people, chart, person, tuple((home + t * (there - home)).tolist())) for t in shares]
    steps = torch.stack([(b - a).norm() for a, b in zip(path, path[1:], strict=False)])
    whole = (path[-1] - person).norm()
    assert steps.max() < 0.05 * whole, "of 400 steps none is a twentieth of the way"
    ends = [(chart.coordinates - end).norm(dim=1).argsort()[:22] for end in (home, there)]
    means = [people.coefficients[near].float().mean(0) for near in ends]
    assert torch.cosine_similarity(path[-1] - person, means[1] - means[0], dim=0) > 0.7, "by weights, not all alike"
    with pytest.raises(VitrineError, match="map_position"):
        at_place(people, chart, person, (1.5, 0.0))


def test_where_a_model_stands(people):
    chart = map_of(people, method="components")
    stood = place_of(people, chart, people.coefficients[40])
    assert torch.allclose(stood, chart.coordinates[40], atol=1e-5)
    short = people.coefficients[3, :30]
    moved = at_place(people, chart, short, (0.4, 0.2))
    assert moved.shape == (people.coefficients.shape[1],) and not torch.equal(moved[:30], short)


def test_neighbours_and_distances(space):
    near = neighbours_of(space, 3)
    rows = space.coefficients
    for i in (0, 7):
        distances = (rows - rows[i]).norm(dim=1)
        names = [space.names[j] for j in distances.argsort()[1:4].tolist()]
        assert [name for name, _ in near[i]] == names
        ratio = near[i][2][1] / near[i][0][1]
        assert ratio == pytest.approx(float(distances.sort().values[3] / distances.sort().values[1]), rel=1e-4)
    alone = neighbours_of(space, 3, [7])
    assert list(alone) == [7] and [name for name, _ in alone[7]] == [name for name, _ in near[7]]


def test_the_file_keeps_coordinates_and_labels(space, loras, tmp_path):
    for kind in (space, DeltaSpace.of(loras(12), [f"m{i}" for i in range(12)])):
        labels = {"age": torch.tensor([1.0, float("nan"), *range(kind.count - 2)])}
        drawn = map_of(kind, labels, "neighbours", seed=3)
        again = load_space(with_map(kind, drawn, labels).save(tmp_path / "s.w2w.safetensors"))
        kept = map_of(again)
        torch.testing.assert_close(kept.coordinates, drawn.coordinates, atol=2e-4, rtol=0)
        assert kept.method == "neighbours" and torch.equal(kept.labels["age"].isnan(), labels["age"].isnan())
        assert again.identity == kind.identity and len(again.deviations) == again.dimension
        assert map_of(again, method="components").method == "components"


def test_building_and_labelling_draw_the_map(tmp_path, capsys):
    for seed in range(6):
        write_lora(tmp_path / "in" / f"p{seed}.safetensors", lora(seed, start=7))
    path, table = tmp_path / "s.w2w.safetensors", tmp_path / "l.csv"
    assert main(["w2w", "build", str(tmp_path / "in"), "--out", str(path)]) == 0
    first = load_space(path).info["map"]
    assert len(first["coordinates"]) == 6 and first["labels"] == {}
    table.write_text("name,age\n" + "".join(f"p{i},{i % 2}\n" for i in range(6)))
    assert main(["w2w", "label", str(path), str(table), "--method", "means"]) == 0
    labelled = load_space(path).info["map"]
    assert labelled["labels"] == {"age": [0, 1, 0, 1, 0, 1]} and labelled["coordinates"] == first["coordinates"]
    capsys.readouterr()


def test_refusals(space):
    with pytest.raises(VitrineError, match="map"):
        map_of(replace(space, coefficients=space.coefficients[:0]))
    with pytest.raises(VitrineError, match="map"):
        map_of(space, method="umap")
    with pytest.raises(VitrineError, match="label"):
        map_picture(map_of(space), "beard")


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.ids, self.links = [], set(), set()

    def handle_starttag(self, tag, attrs):
        facts = dict(attrs)
        self.tags.append((tag, facts))
        self.ids |= {facts["id"]} if "id" in facts else set()
        self.links |= {facts["href"]} if tag == "a" else set()


def test_the_page_needs_nothing_beside_it(space, tmp_path, capsys):
    names = [*space.names[:-1], "<b>&"]
    vector = torch.zeros(space.dimension)
    vector[0] = space.deviations[0]
    odd = with_directions(replace(space, names=tuple(names)), {"size <i>": vector})
    path = odd.save(tmp_path / "odd.w2w.safetensors")
    Image.new("RGB", (80, 60), "red").save(tmp_path / f"{names[0]}.png")
    (tmp_path / "l.csv").write_text(f"name,age\n{names[0]},3\n{names[1]},9\n")
    out = tmp_path / "map.html"
    options = ["--labels", str(tmp_path / "l.csv"), "--thumbnails", str(tmp_path), "--out", str(out), "--store"]
    assert main(["w2w", "map", str(path), *options]) == 0
    assert "1 thumbnails" in capsys.readouterr().out
    text = out.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    kinds = [tag for tag, _ in page.tags]
    assert kinds.count("circle") == space.count - 1 and kinds.count("image") == 1 and kinds.count("tr") > space.count
    assert {link.removeprefix("#") for link in page.links} <= page.ids  # every link leads to a row of the page
    assert "script" not in kinds and "<b>&" not in text and "size &lt;i&gt;" in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    again = load_space(path)
    assert len(again.info["map"]["coordinates"]) == space.count and again.info["map"]["labels"]["age"][0] == 3
    assert main(["w2w", "map", "--store"]) == 2


def test_the_picture_is_coloured_by_the_label(people):
    drawn = map_of(people, method="components")
    plain, coloured = (np.asarray(map_picture(drawn, label, side=300)) for label in ("", "beard"))
    assert plain.shape == (300, 300, 3) and not np.array_equal(plain, coloured)
    orange = (coloured[..., 0] > 190) & (coloured[..., 2] < 60)
    assert orange.any() and not ((plain[..., 0] > 190) & (plain[..., 2] < 60)).any()
    ringed = np.asarray(map_picture(drawn, "beard", [(0.9, 0.9)], side=300))
    assert (ringed[20:40, 260:290] == 0).all(-1).sum() > (coloured[20:40, 260:290] == 0).all(-1).sum()
