"""The filter's scores where the right answer is known, the ranking of a model's places, and preset files."""

import json

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image
from vitrine.cli.main import main
from vitrine.engine.activations.correspondence import parse_keypoints
from vitrine.engine.activations.presets import PRESETS, FeaturePreset
from vitrine.engine.activations.qualitative_filter import (
    Properties,
    filtered,
    granularity_score,
    locality_score,
    measure_properties,
    noise_score,
)
from vitrine.engine.activations.ranked_pictures import Pair, Pictures
from vitrine.engine.activations.ranking import RankingConfig, rank_sites, spatial_sites
from vitrine.engine.activations.site_search import SPLITS, folds_of, greedy_search, stratified
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline
from vitrine.engine.portraits import build_models, load_portraits, render, sample_scenes
from vitrine.engine.settings.ranking_options import FilterRule
from vitrine_tests import models

pytestmark = pytest.mark.rounding


def waves(cycles, size=16, channels=6):
    """(1, C, size, size): plane waves of so many cycles across the picture."""
    x = torch.arange(size) / size
    phases = torch.arange(channels)[:, None] * 0.7
    rows = torch.sin(2 * torch.pi * cycles * x + phases)
    return rows[None, :, None, :].expand(1, channels, size, size).clone()


# --- scores --------------------------------------------------------------------------------------------------------
def test_noise_is_what_two_noises_do_not_share():
    g = torch.Generator().manual_seed(0)
    signal, a, b = (torch.randn(4, 32, 8, 8, generator=g) for _ in range(3))
    assert noise_score(signal, signal) < 1e-6 and abs(noise_score(a, b) - 1) < 0.05
    shares = [noise_score(signal + k * a, signal + k * b) for k in (0.1, 0.5, 1.0, 2.0)]
    assert shares == sorted(shares)
    # cosine of s + k a and s + k b is 1 / (1 + k^2) for independent parts of equal size
    assert abs(shares[2] - 0.5) < 0.03
    offset = noise_score(signal + 100, signal + 100 + 0.5 * b)
    assert offset > 0.02, "a large common mean must not hide the noise"


@pytest.mark.parametrize("cycles", [1, 3, 6])
def test_granularity_of_a_wave_is_its_number_of_cycles(cycles):
    assert abs(granularity_score(waves(cycles)) - cycles) < 1e-3
    assert abs(granularity_score(waves(cycles, 32)) - cycles) < 1e-3, "cycles across the picture, whatever the grid"


def test_locality_tells_positions_from_content():
    h = w = 12
    rows, columns = torch.meshgrid(torch.arange(h) / h, torch.arange(w) / w, indexing="ij")
    # Wide Gaussian bumps over the picture: neighbours look alike and nothing else does
    centres = torch.rand(64, 2, generator=torch.Generator().manual_seed(0))
    bumps = torch.exp(-(((rows - centres[:, :1, None]) ** 2 + (columns - centres[:, 1:, None]) ** 2) / 0.1))
    content = torch.randn(1, 64, h, w, generator=torch.Generator().manual_seed(1))
    assert locality_score(bumps[None]) > 0.7 and abs(locality_score(content)) < 0.1
    from scipy.stats import spearmanr

    f = content[0].flatten(1) - content[0].flatten(1).mean(1, keepdim=True)
    distances = torch.pdist(torch.nn.functional.normalize(f.T, dim=1))
    place = torch.stack([rows.flatten(), columns.flatten()], 1)
    assert abs(locality_score(content) - spearmanr(torch.pdist(place), distances).statistic) < 1e-4


def test_the_rule_says_why():
    table = {f"p{i}": Properties(0.1, 2.0, 0.3) for i in range(5)}
    table |= {"noisy": Properties(0.3, 2.0, 0.3), "fine": Properties(0.05, 9.0, 0.3), "clean": Properties(0.01, 2, 0.3)}
    table |= {"flat": Properties(0.01, 2.0, 0.0), "bound": Properties(0.01, 2.0, 0.9)}
    kept, dropped = filtered(FilterRule(noise=1.0), table)
    assert kept == [*(f"p{i}" for i in range(5)), "clean"]
    assert {a: why[0].split()[0] for a, why in dropped.items()} == {
        "noisy": "diffusion",
        "fine": "over-refined,",
        "flat": "no",
        "bound": "bound",
    }
    assert filtered(FilterRule(None, None, (None, None)), table) == (list(table), {})
    for bad in ({"noise": -1.0}, {"locality": (0.5, 0.1)}):
        with pytest.raises(VitrineError):
            FilterRule(**bad)


# --- ranking -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pipe():
    return ActivationTapPipeline.from_pipe(load_portraits().pipeline())


@pytest.fixture(scope="module")
def pictures():
    drawn = render(sample_scenes(range(7_900_000, 7_900_008)))
    return drawn.images * 2 - 1, (drawn.parts > 0).long()


PLACES = "up-level0-repeat0-*-q up-level0-repeat0-vit-out down-level0-repeat0-res-out up-level0-upsampler-out"


def test_ranking_filters_compares_and_makes_a_preset(pipe, pictures, tmp_path):
    images, masks = pictures
    ranking = pipe.rank(images, masks, "a face", config=RankingConfig(PLACES, most=2, strips=True), state=tmp_path)
    assert "down-level0-repeat0-res-out" in ranking.dropped and 1 <= len(ranking.chosen) <= 2
    scores = list(ranking.search.singles.values())
    assert scores == sorted(scores, reverse=True) and ranking.search.score >= scores[0]
    strip = ranking.strip(ranking.chosen[0], 32)
    assert strip.shape == (3, 32, 8 * 32) and float(strip.min()) >= 0 and float(strip.max()) <= 1
    text = ranking.summary()
    assert "dropped down-level0-repeat0-res-out: diffusion noise" in text and "score" in text
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.safetensors")}
    again = pipe.rank(images, masks, "a face", config=RankingConfig(PLACES, most=2), state=tmp_path)
    assert again.chosen == ranking.chosen
    assert before == {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.safetensors")}, "finished scores are kept"
    preset = ranking.preset("mine", pipe.unet, 50.0)
    loaded = FeaturePreset.load(preset.save(tmp_path / "p.json"))
    loaded.check(pipe.unet)
    assert loaded.preset.addresses == ranking.chosen and loaded.preset.config().timestep == 50.0


def test_without_masks_the_filter_alone_decides(pipe, pictures):
    ranking = pipe.rank(pictures[0], config=RankingConfig(PLACES, most=1))
    assert ranking.search is None and len(ranking.chosen) == 1
    quietest = min(ranking.kept, key=lambda a: ranking.properties[a].noise)
    assert ranking.chosen == (quietest,)


def test_transformers_are_ranked_too():
    net = models.sd3()
    denoiser = Denoiser.from_diffusers(net, FlowMatchEulerDiscreteScheduler())
    cond = Condition(torch.randn(1, 5, 24), torch.randn(1, 20))
    names = spatial_sites(net)
    rule = FilterRule(None, None, (None, None))
    pictures = Pictures.of(torch.randn(3, 4, 16, 16), cond)
    ranking = rank_sites(denoiser, pictures, RankingConfig(timestep=100.0, rule=rule))
    assert list(ranking.properties) == names and not ranking.dropped and len(ranking.chosen) == 4
    assert not [n for n in names if "ctx" in n or n.endswith("-map")]


@pytest.mark.nightly
def test_bad_requests_are_refused_before_any_forward(pipe, pictures):
    images, masks = pictures
    for told, word in (
        ({"masks": masks[:5]}, "one mask per picture"),
        ({"masks": masks * 0}, "two or more"),
        ({"config": RankingConfig("up-level9-*")}, "address"),
        ({"config": RankingConfig(rule=FilterRule(noise=1e-9))}, "loosen"),
    ):
        with pytest.raises(VitrineError, match=word):
            pipe.rank(images, **told)
    with pytest.raises(VitrineError, match="two or more"):
        pipe.rank(images[:1])
    bare = build_models(0)
    denoiser, cond = Denoiser.from_diffusers(bare.unet, DDIMScheduler()), Condition(torch.zeros(1, 24, 64))
    with pytest.raises(VitrineError, match="grid"):
        measure_properties(denoiser, torch.randn(2, 4, 16, 16), cond, ["mid-vit-block0-cross-k"])


# --- files and command line ----------------------------------------------------------------------------------------
def test_preset_files_refuse_other_models_and_broken_content(pipe, tmp_path):
    good = FeaturePreset(PRESETS["portraits"], "feedfeedfeedfeed")
    path = good.save(tmp_path / "p.json")
    with pytest.raises(VitrineError, match="this model"):
        FeaturePreset.load(path).check(pipe.unet)
    with pytest.raises(VitrineError, match="are not here"):
        FeaturePreset(PRESETS["Ours-v1.5"]).check(pipe.unet)
    table = json.loads(path.read_text())
    for key, value in (("version", 9), ("preset", {"name": "x"}), ("format", "other")):
        path.write_text(json.dumps(table | {key: value}))
        with pytest.raises(VitrineError, match=r"p\.json"):
            FeaturePreset.load(path)
    path.write_text(json.dumps(table | {"preset": table["preset"] | {"timestep": -5}}))
    with pytest.raises(VitrineError, match=r"p\.json"):
        FeaturePreset.load(path)


@pytest.mark.nightly
def test_vitrine_taps_rank(tmp_path, pictures, capsys):
    images, masks = pictures
    for folder in ("pictures", "masks"):
        (tmp_path / folder).mkdir()
    for i, (image, mask) in enumerate(zip(images, masks, strict=True)):
        array = ((image / 2 + 0.5) * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(tmp_path / "pictures" / f"{i}.png")
        Image.fromarray(mask.byte().numpy()).save(tmp_path / "masks" / f"{i}.png")
    out = tmp_path / "preset.json"
    told = ["taps", "rank", str(tmp_path / "pictures"), "--masks", str(tmp_path / "masks"), "--out", str(out), "--most"]
    assert main([*told, "1"]) == 0
    printed = capsys.readouterr().out
    assert "sites kept" in printed and "dropped" in printed
    assert len(FeaturePreset.load(out).preset.addresses) == 1
    assert main(["taps", "rank", str(tmp_path / "none")]) == 2


def test_rounding_does_not_choose_between_places_that_score_alike():
    table = {("a",): 0.9, ("b",): 0.8, ("c",): 0.7, ("a", "b"): 0.9300, ("a", "c"): 0.9301}

    def chosen(**tie):
        return greedy_search("abc", lambda key: table[key], most=2, **tie).chosen

    assert chosen() == ("a", "c") and chosen(tie=0.001) == ("a", "b")


# --- splits and keypoints ------------------------------------------------------------------------------------------
def test_stratified_parts_show_each_class_as_often():
    rows = torch.rand(40, 5, generator=torch.Generator().manual_seed(0)) < torch.tensor([0.9, 0.5, 0.3, 0.15, 0.1])
    present = [set(torch.nonzero(row)[:, 0].tolist()) for row in rows]
    for number in (2, 4):
        parts = stratified(present, number)
        assert sorted(n for part in parts for n in part) == list(range(40))
        assert all(abs(len(part) - 40 / number) <= 2 for part in parts)
        for c in range(5):
            counts = [sum(c in present[n] for n in part) for part in parts]
            assert max(counts) - min(counts) <= 2, (c, counts)


def test_folds_fit_and_judge_and_refuse_what_cannot_be_judged():
    present = [{0, 1}, {0, 1}, {0, 2}, {0, 2}, {0, 1}, {0, 2}]
    with pytest.raises(VitrineError, match=r"\[2\] missing.*stratified|stratified"):
        folds_of([{0, 1}, {0, 1}, {0, 1, 2}, {0, 1, 2}])
    (fold,) = folds_of(present[:4], "stratified")
    assert {c for n in fold.fitted for c in present[n]} == {c for n in fold.judged for c in present[n]} == {0, 1, 2}
    crossed = folds_of(present, "crossed", 3)
    assert sorted(n for fold in crossed for n in fold.judged) == list(range(6))
    assert all(not set(fold.fitted) & set(fold.judged) and len(fold.fitted) == 4 for fold in crossed)
    with pytest.raises(VitrineError, match="another picture"):
        folds_of([{0, 1}, {0, 1}, {0, 1}, {0, 3}], "stratified")
    for settings in ({"split": "thirds"}, {"split": "crossed", "folds": 9}):
        with pytest.raises(VitrineError):
            folds_of(present, **settings)


def asked(counts):
    """A network that must not be called."""

    def refusing(*_):
        counts.append(1)
        raise AssertionError("a forward ran")

    return refusing


def test_classes_missing_from_a_half_are_refused_before_any_forward(pipe, pictures):
    images, masks = pictures
    masks = masks.clone()
    masks[6:, :8, :8] = 2
    calls = []
    handle = pipe.unet.register_forward_pre_hook(asked(calls))
    try:
        with pytest.raises(VitrineError, match="missing from a part"):
            pipe.rank(images, masks, config=RankingConfig(PLACES))
    finally:
        handle.remove()
    assert not calls


@pytest.mark.nightly
def test_three_classes_are_ranked_by_every_split(pipe, pictures, tmp_path):
    images, masks = pictures
    masks = masks.clone()
    masks[[1, 6], :8, :8] = 2  # both in a half of their own, and in parts of their own
    places, rule = "up-level0-repeat0-vit-out up-level0-upsampler-out", FilterRule(None, None, (None, None))

    def by(split):
        config = RankingConfig(places, rule=rule, most=1, split=split, folds=2)
        return pipe.rank(images, masks, config=config, state=tmp_path)

    scores = [by(split) for split in SPLITS]
    assert len({r.search.score for r in scores}) == 3, "each split keeps scores of its own"
    assert {p.name for p in tmp_path.glob("scores*")} == {
        "scores-halves-held-out.safetensors",
        "scores-stratified-held-out.safetensors",
        "scores-crossed-2.safetensors",
        "scores-crossed-2-without-0.safetensors",
        "scores-crossed-2-without-1.safetensors",
    }
    assert all(0 < r.held_out < 1 for r in scores)
    assert by("crossed").search == scores[2].search


def test_keypoints_rank_places_as_they_match(pictures, tmp_path):
    """The score of a place is the PCK of the pipeline's own matches."""
    matching = CorrespondencePipeline.from_pipe(load_portraits().pipeline())
    keypoints = render(sample_scenes(range(7_900_000, 7_900_004))).keypoints
    images, place = pictures[0][:4], "up-level0-repeat0-vit-out"
    rule = FilterRule(None, None, (None, None))
    told = {"keypoints": keypoints, "config": RankingConfig([place, "up-level0-upsampler-out"], rule=rule, alpha=0.05)}
    ranking = matching.rank(images, None, "a face", **told)
    hits = []
    for n in (0, 2):  # 1 and 3 are held out
        other = (n + 2) % 4
        seen = ~(keypoints[n].isnan() | keypoints[other].isnan()).any(1)
        (match,) = matching.match(images[n], images[other], keypoints[n][seen], "a face", addresses=place, timestep=50)
        hits.append((match.points - keypoints[other][seen]).norm(dim=1) <= 0.05)
    assert ranking.search.singles[place] == pytest.approx(torch.cat(hits).float().mean().item(), abs=0.021)
    small = matching.rank(images, None, "a face", **told, memory="64MiB", state=tmp_path)
    assert small.search.singles == pytest.approx(ranking.search.singles, abs=0.021)
    assert {p.name for p in tmp_path.glob("scores*")} == {"scores-points-0.05-held-out.safetensors"}
    hits = []
    for n in (1, 3):
        other = (n + 2) % 4
        seen = ~(keypoints[n].isnan() | keypoints[other].isnan()).any(1)
        settings = {"addresses": list(ranking.chosen), "timestep": 50}
        (match,) = matching.match(images[n], images[other], keypoints[n][seen], "a face", **settings)
        hits.append((match.points - keypoints[other][seen]).norm(dim=1) <= 0.05)
    assert ranking.held_out == pytest.approx(torch.cat(hits).float().mean().item(), abs=0.041)


def test_keypoints_that_name_no_place_are_refused(pictures):
    matching = CorrespondencePipeline.from_pipe(load_portraits().pipeline())
    points, nowhere = torch.rand(4, 3, 2), torch.full((4, 3, 2), float("nan"))
    for bad, word in (
        (points[:3], r"\(4, K, 2\)"),
        (nowhere, "two pictures share"),
        (points + 1, r"\[0, 1\]"),
        ([Pair(0, 7, points[0], points[1])], "picture 7"),
        ([Pair(0, 1, points[0], points[1][:2])], "where it went"),
    ):
        with pytest.raises(VitrineError, match=word):
            matching.rank(pictures[0][:4], keypoints=bad, config=RankingConfig(PLACES))
    with pytest.raises(VitrineError, match="one of them"):
        Pictures(4, None, lambda numbers: None, (Pair(0, 1, points[0], points[1]),))


@pytest.mark.nightly
def test_keypoints_as_text_and_on_the_command_line(tmp_path, pictures, capsys):
    parsed = parse_keypoints("0.5 0.25; -\n32 16; 0 64", 2, (64, 64))
    assert parsed[0, 0].tolist() == [0.5, 0.25] == parsed[1, 0].tolist() and bool(parsed[0, 1].isnan().all())
    for bad in ("0.5 0.5", "0.5 0.5\n0.5 0.5; -", "0.5 0.5 0.5\n0.5 0.5"):
        with pytest.raises(VitrineError):
            parse_keypoints(bad, 2, (64, 64))
    table = {}
    (tmp_path / "pictures").mkdir()
    for i, points in enumerate(render(sample_scenes(range(7_900_000, 7_900_004))).keypoints):
        array = ((pictures[0][i] / 2 + 0.5) * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(tmp_path / "pictures" / f"{i}.png")
        table[f"{i}.png"] = [None if point[0] != point[0] else point for point in points.tolist()]
    keypoints, out = tmp_path / "points.json", tmp_path / "preset.json"
    keypoints.write_text(json.dumps(table))
    told = ["taps", "rank", str(tmp_path / "pictures"), "--keypoints", str(keypoints), "--out", str(out), "--most", "1"]
    assert main(told) == 0 and "score" in capsys.readouterr().out
    assert len(FeaturePreset.load(out).preset.addresses) == 1
    keypoints.write_text(json.dumps({"0.png": [[0.5, 0.5]]}))
    assert main(told) == 2
