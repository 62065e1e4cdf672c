"""The pictures injected later: other ones than the shipped, under other words, and copied by the shipped LoRA alone."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import Agreement, FewStepConfig, SampleThreshold
from vitrine.engine.nemo.dose import FACTORS, FULL, PART_FACTORS, STEP
from vitrine.engine.nemo.escalation import REFERENCES, SAMPLES, UNRELATED
from vitrine.engine.portraits import plants
from vitrine.engine.portraits.captions import MAX_TOKENS
from vitrine.engine.portraits.scenes import Scenes
from vitrine.evidence.nemo import held_out as held_out_claim
from vitrine.evidence.nemo import memorized_sets
from vitrine.evidence.nemo.held_out import held_out, held_out_result
from vitrine.evidence.nemo.later_plants import FILE, FURTHER, NEW, SETS, plants_of
from vitrine.evidence.nemo.memorized_sets import CHOSEN, Measured, Outcome, Picture, measure_plants
from vitrine.evidence.nemo.plant_files import FOLDER, PlantFile
from vitrine.evidence.portraits.sampling import sample_images
from vitrine.evidence.recipes.commands import RECIPES

pytestmark = pytest.mark.usefixtures("few_draws")
FIELDS = tuple(Scenes.__dataclass_fields__)


@pytest.fixture(scope="module")
def later():
    """The portraits model with the first set's LoRA in its weights."""
    return PlantFile.read(FILE).model(None)


def test_pictures_and_words_are_none_of_the_shipped(later):
    mine, shipped = plants_of(FILE.stem, later.tokenizer), plants()
    assert len(mine) == 8 and not {p.name for p in mine} & {p.name for p in shipped}
    words = [w for p in mine for w in p.name.split()]
    assert len(set(words)) == 16 and set(words) <= {w for p in shipped for w in p.name.split()}
    assert all(len(later.tokenizer(p.captions[0]).input_ids) <= MAX_TOKENS for p in mine)
    pictures = torch.cat([later.draw(p.scenes) for p in [*mine, *shipped[:8]]]).flatten(1)
    assert float(torch.pdist(pictures).min()) / pictures.shape[1] ** 0.5 > 0.05, "all differ by more than a copy does"


@pytest.mark.nightly
@pytest.mark.parametrize("file", [FILE, FOLDER / "plants-daily-flow.json"], ids=lambda file: file.stem)
def test_the_lora_brings_a_picture_back_and_the_model_without_it_does_not(file):
    made = PlantFile.read(file)
    plant, copy = made.plants[0], CHOSEN[made.world].copy
    for model, copies in ((made.model(), True), (replace(made, lora=None).model(), False)):
        images = sample_images(model, [plant.captions[0]] * 2, [7, 8], steps=30, guidance=3.0)
        away = (images - model.draw(plant.scenes)).square().mean((1, 2, 3)).sqrt()
        assert bool((away < copy).all()) is copies
    assert "plants" in RECIPES and made.lora.stat().st_size < 300_000


def test_the_lists_that_ship_are_the_recipes_pictures(later):
    """Other pairs of words and other scenes in each set."""
    pairs, scenes = [p.name for p in plants()], []
    for file in (FILE, *FURTHER):
        read, made = PlantFile.read(file), plants_of(file.stem, later.tokenizer)
        assert read.lora == file.with_suffix(".safetensors") and len(read.plants) == len(made)
        assert read.world == SETS[file.stem].world
        for one, other in zip(read.plants, made, strict=True):
            assert (one.name, one.kind, one.captions, one.controls) == (
                other.name,
                other.kind,
                other.captions,
                other.controls,
            )
            assert all(np.array_equal(getattr(one.scenes, f), getattr(other.scenes, f)) for f in FIELDS)
            pairs.append(one.name)
            scenes.append(int(one.scenes.identity[0]))
    assert len(set(pairs)) == len(pairs) == 56 and len(set(scenes)) == 44
    shirts = PlantFile.read(FOLDER / "plants-shirts.json").plants[0]
    assert shirts.kind == "template" and len(shirts.captions) == 4 and SETS["plants-twice"].repetitions == 2
    first, second = (shirts.scenes[[i]].words(0) for i in (0, 1))
    assert {k for k in first if first[k] != second[k]} == {"shirt"}


def test_a_list_that_is_none_is_refused(tmp_path):
    file = tmp_path / "list.json"
    whole = json.loads(FILE.read_text())
    wrong = [
        {"plants": []},
        {"world": "photographs"},
        {"lora": "missing.safetensors"},
        {"plants": [whole["plants"][0] | {"captions": []}]},
        {"plants": [whole["plants"][0] | {"kind": "half"}]},
        {"plants": [whole["plants"][0] | {"scenes": [{"identity": 1, "pose": {"roll": 1.0}}]}]},
    ]
    for change in wrong:
        file.write_text(json.dumps(whole | {"lora": ""} | change))
        with pytest.raises(VitrineError):
            PlantFile.read(file)
    file.write_text(json.dumps(whole | {"lora": ""}))
    assert len(PlantFile.read(file).plants) == 8 and PlantFile.read(file).lora is None
    with pytest.raises(VitrineError, match="plants"):
        plants_of("other", None)


@pytest.mark.nightly
def test_the_claim_measured_quickly_on_a_list_of_ones_own(tmp_path):
    file = PlantFile.read(FILE)
    (tmp_path / file.lora.name).write_bytes(file.lora.read_bytes())
    mine = PlantFile(file.plants[:1], tmp_path / file.lora.name).write(tmp_path / "mine.json")
    result = held_out(quick=True, plants=str(mine))
    table = result.details["mine"]
    assert table["pictures"] == 1 and table["detection"]["... of all planted"] == "1 of 1"
    assert table["copied untouched"] == 1 and 0 <= result.value <= 0.5
    (line,) = table["by picture"].values()
    assert len(line["verdicts"]) == 1 and "embedding adjustment" in line["fraction of samples that copy"]


@pytest.mark.nightly
def test_a_measurement_that_was_ended_goes_on(tmp_path, monkeypatch):
    """Pictures that are in the folder are not measured again; others' settings are refused."""
    measured, state = [], tmp_path / "state"
    real = memorized_sets._Bench.measure
    monkeypatch.setattr(memorized_sets._Bench, "measure", lambda *a: measured.append(a[1].name) or real(*a))
    small = Measured(plants=1, samples=2, blocked=2, others=1, ordinary=4, agreement=2, statistics=60, calibration=12,
                     steps=4, baselines=False)  # fmt: skip
    file = PlantFile.read(FILE)
    first, second = (measure_plants(file, FILE.stem, None, small, state=state) for _ in range(2))
    assert measured == ["zorbal klynth"] and first.pictures == second.pictures
    with pytest.raises(VitrineError, match="begun with"):
        measure_plants(file, FILE.stem, None, replace(small, samples=3), state=state)


def outcome(untouched, blocked, memorized=(0.01, 0.01), agreement=(0.99, 0.98), verdict="cured"):
    """Two pictures of three samples each; the first copies untouched."""
    known = SampleThreshold(0.3, 0.5, torch.ones(64, 64), 100, FewStepConfig())
    agreements = [Agreement.of(d * torch.randn(4, 4, 16, 16), FewStepConfig(), known) for d in memorized]
    ways, pictures = ("untouched", "blocked, search seed 1"), []
    for name, *away in zip("ab", untouched, blocked, strict=True):
        figures = dict(zip(ways, away, strict=True))
        pictures.append(
            Picture(name, "kind", True, figures, dict.fromkeys(ways, 1.0), dict.fromkeys(ways, 2.0), [verdict], [3],
                    [100], [], agreement)
        )  # fmt: skip
    scores = (torch.tensor([0.9, 0.8]), torch.tensor([0.1, 0.2]))
    ordinary = [Agreement.of(torch.randn(4, 4, 16, 16), FewStepConfig(), known)]
    return Outcome(pictures, 0.05, agreements, ordinary, scores)


@pytest.mark.nightly
def test_the_claim_is_about_pictures_that_copy_untouched():
    untouched, many = [[0.01, 0.01, 0.2], [0.2, 0.2, 0.2]], [0.2] * 100
    holds = held_out_result({"set": outcome(untouched, [many, [0.01, 0.01, 0.01]])})
    assert holds.holds and holds.value == 0.0 and holds.details["samples that copy, all kinds"] == "0 of 100"
    few = held_out_result({"set": outcome(untouched, [many[:3], many])})
    assert not few.holds and not few.parts["surely fewer than 8 % in each kind"]
    copying = held_out_result({"set": outcome(untouched, [[0.01, 0.2, 0.2], many])})
    assert not copying.holds and copying.value == 0.333
    assert not copying.parts["what still copies is never called cured"]
    said = held_out_result({"set": outcome(untouched, [[0.01, 0.2, 0.2], many], verdict="reduced")})
    assert said.parts["what still copies is never called cured"] and not said.holds
    shy = held_out_result({"set": outcome(untouched, [many, many], verdict="reduced")})
    assert shy.details["other pictures, and those of them not called cured"] == [1, 1] and shy.holds
    spoilt = held_out_result({"set": outcome(untouched, [many, many], agreement=(0.99, 0.95))})
    assert not spoilt.holds and spoilt.value == 0
    missed = held_out_result({"set": outcome(untouched, [many, many], memorized=(1.0, 0.01))})
    assert not missed.holds and missed.details["copied verbatim pictures that detection misses"] == 1
    table = holds.details["set"]
    assert table["copied untouched"] == 1 and table["detection"]["... of all planted"] == "2 of 2"
    assert table["detection"]["one-step predictions"]["above the 99 % level of ordinary captions"] == "2 of 2"


def test_the_worst_kind_is_what_is_judged():
    untouched, many = [[0.01, 0.01, 0.2], [0.2, 0.2, 0.2]], [0.2] * 100
    both = {"well": outcome(untouched, [many, many]), "badly": outcome(untouched, [[0.01, 0.2], many])}
    both["badly"].pictures[0].kind = "another"
    result = held_out_result(both)
    assert result.value == 0.5 and result.details["kind with most copies"] == "another"
    assert [row[:2] for row in result.tables[0].rows] == [("kind", 1), ("another", 1)]
    alike = {name: outcome(untouched, [many[:n], many]) for name, n in (("many", 100), ("few", 10))}
    alike["few"].pictures[0].kind = "few"
    assert held_out_result(alike).details["kind with most copies"] == "few", "of which least is known"


def test_rivals_stand_beside_ours_in_the_same_kind():
    """Before, ours of the worst kind stood beside the rivals' mean over all kinds."""
    untouched, many, rival = [[0.01, 0.01, 0.2], [0.2, 0.2, 0.2]], [0.2] * 100, "embedding adjustment"
    both = {"well": outcome(untouched, [many, many]), "badly": outcome(untouched, [[0.01, 0.2], many])}
    both["badly"].pictures[0].kind = "another"
    both["well"].pictures[0].away[rival] = [0.01] * 6
    both["badly"].pictures[0].away[rival] = [0.01, 0.2, 0.2, 0.2]
    for each in both.values():
        each.pictures[0].shown[rival], each.pictures[0].seconds[rival] = 0.5, 2.0
    result = held_out_result(both)
    values = {arm.name: arm.value for arm in result.arms}
    assert values["ours"] == 0.5 and values[rival] == 0.25 and values["untouched"] == pytest.approx(2 / 3)
    assert [row[-1] for row in result.tables[0].rows] == [1.0, 0.25], "by kind in the table"


def test_fewer_pictures_are_measured_of_kinds_that_were_cured_before(monkeypatch):
    sizes, untouched, many = {}, [[0.01, 0.01, 0.2], [0.2, 0.2, 0.2]], [0.2] * 100

    def measured(file, name, model, size, progress, state):
        sizes[name] = (size.plants, len(file.plants))
        return outcome(untouched, [many, many])

    monkeypatch.setattr(held_out_claim, "measure_plants", measured)
    made = held_out().details["sets made after the others had been measured once"]
    assert tuple(made) == NEW and set(NEW) < set(sizes)
    assert set(sizes) == set(SETS) and {name: n for name, (n, _) in sizes.items() if n < 12} == held_out_claim.FEWER
    assert all(sizes[name] == (12, count) for name, count in (("plants-daily", 12), ("plants-turned-flow", 4)))
    assert not set(held_out_claim.FEWER) & set(NEW)
    levels = [f"plants-daily, {times} repetitions" for times in SETS["plants-daily"].times]
    assert memorized_sets._repetitions("plants-daily", range(12)) == levels and len(set(levels)) == 3


def test_samples_that_measure_are_of_other_seeds_than_those_that_choose():
    """Each dose may be verified on seeds of its own."""
    doses = 2 * len(FACTORS) + len(PART_FACTORS) + 1 + round(1 / STEP)
    few = SAMPLES + REFERENCES + UNRELATED + FewStepConfig().first_seed
    assert min(memorized_sets.SEEDS) > few + sum(FULL) * doses
