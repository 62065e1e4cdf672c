"""The portraits transformer, and its way from 64 to 128 pixels: runs, resumption, curves, export, claims."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.dataset import PORTRAITS
from vitrine.engine.portraits.scenes import ATTRIBUTES
from vitrine.engine.portraits.shipped import load_transformer, shipped_transformers, transformer_folder
from vitrine.engine.resolution import ResolutionTransferConfig, apply
from vitrine.evidence.control.controlled_transformer import ControlledTransformer
from vitrine.evidence.portraits.transformer import Collection, save_transformer, saved_data, transformer_data
from vitrine.evidence.recipes.commands import main as recipe
from vitrine.evidence.registry import all_claims
from vitrine.evidence.resolution import curves as curves_of
from vitrine.evidence.resolution import transfer_training
from vitrine.evidence.resolution.claims import judged
from vitrine_tests.machine.pretend import DEVICE, Accelerator

SMALL = {"batch": 2, "pictures": 6, "samples": 3, "sampler_steps": 1}
PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"


@pytest.fixture(scope="module")
def transformer():
    return ControlledTransformer.open("power-cosine", load_portraits())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two arms of one seed in two sittings; a third arm later shares the pictures."""
    folder = tmp_path_factory.mktemp("run")
    config = transfer_training.TransferConfig(**SMALL)
    transfer_training.transfer(folder, [0], 2, config, ["grid-rescaled", "extrapolated-rescaled"], until=1)
    transfer_training.transfer(folder, [0], 2, config)
    return folder


def weights(folder, arm="grid-rescaled"):
    return load_file(folder / f"{arm}-0" / "state.safetensors")


def test_it_draws_at_its_side_and_at_others(transformer):
    one = transformer.draw([PROMPT], [3], steps=2)
    assert one.shape == (1, 3, 64, 64) and 0 <= float(one.min()) < float(one.max()) <= 1
    two = transformer.draw([PROMPT, PROMPT], [5, 3], steps=2)
    assert torch.allclose(two[1:], one, atol=1e-5), "rows do not depend on the batch"
    assert transformer.draw([PROMPT], [3], steps=2, side=128).shape == (1, 3, 128, 128)
    told = transformer.draw([PROMPT], [3], {"height": 16.0, "width": 16.0}, steps=2)
    silent = transformer.draw([PROMPT], [3], steps=2, silent_controls=True)
    unguided = transformer.draw([PROMPT], [3], steps=2, guidance=1.0)
    assert len({float(p.sum()) for p in (one, told, silent, unguided)}) == 4


def test_it_is_a_pipeline_to_resolution_transfer(transformer):
    before = transformer.draw([PROMPT], [3], steps=2, side=128)
    scheduler, table = transformer.scheduler, transformer.transformer.pos_embed.pos_embed
    drawn = []
    for schedule, positions in (("relabel", "grid"), ("resample", "grid"), ("none", "extrapolate")):
        config = ResolutionTransferConfig((128, 128), (64, 64), schedule=schedule, pos_embed=positions, override=True)
        with apply(transformer, config):
            drawn.append(transformer.draw([PROMPT], [3], steps=2, side=128))
    assert transformer.scheduler is scheduler and transformer.transformer.pos_embed.pos_embed is table
    assert torch.equal(transformer.draw([PROMPT], [3], steps=2, side=128), before)
    assert all(not torch.allclose(d, before, atol=1e-3) for d in drawn)
    with apply(transformer, ResolutionTransferConfig((128, 128), (64, 64), schedule="none", pos_embed="grid")):
        # Its own rule at another size is grid resampling already, so this arm is the untouched model.
        assert torch.allclose(transformer.draw([PROMPT], [3], steps=2, side=128), before, atol=1e-5)


def test_unknown_transformers_are_refused():
    assert {"constant", "power-cosine"} <= set(shipped_transformers())
    with pytest.raises(VitrineError, match="power-cosine"):
        load_transformer("power-sine")
    assert transformer_folder(transformer_folder("constant")) == transformer_folder("constant")


def test_pictures_are_made_once(tmp_path):
    path, model = tmp_path / "deep" / "pictures.safetensors", load_portraits()
    made = saved_data(path, model, 3, 128)
    assert made.latents.shape == (3, 4, 32, 32) and made.latents.dtype == torch.float16
    stamp = os.stat(path).st_mtime_ns
    again = saved_data(path, model, 3, 128)
    assert os.stat(path).st_mtime_ns == stamp and torch.equal(made.text, again.text)
    assert all(torch.equal(v, again.controls[k]) for k, v in made.controls.items())
    with pytest.raises(VitrineError, match="3, 4, 32, 32"):
        saved_data(path, model, 4, 128)


def test_small_pictures_are_of_other_things_than_large_ones():
    """Sizes and values keep their shares; who goes with whom changes."""
    from vitrine.engine.portraits import sample_scenes
    from vitrine.evidence.portraits.transformer import LINK, SHARES, SIZES, _linked

    scenes, size = _linked(sample_scenes(range(2000)), PORTRAITS.optional, torch.Generator().manual_seed(0))
    held = torch.stack([(size == s).float().mean() for s in SIZES])
    assert torch.allclose(held, torch.tensor(SHARES), atol=0.03)
    for name, count in (("background", 6), ("mouth", 4)):
        value = torch.from_numpy(scenes.column(name)).float()
        assert torch.allclose(value.long().bincount() / 2000, torch.full((count,), 1 / count), atol=0.04)
        both = torch.stack([value, size.log()])
        assert LINK - 0.15 < float(torch.corrcoef(both)[0, 1]) < LINK + 0.05
    assert (scenes.column("hat") == sample_scenes(range(2000)).column("hat")).all()


@pytest.mark.nightly
@pytest.mark.parametrize(("start", "lesson"), [(None, "collection"), ("constant", "sides"), ("constant", "flips")])
def test_training_goes_on_where_it_stopped(tmp_path, start, lesson):
    from vitrine.evidence.control.sized_training import TransformerTrainConfig, train_transformer

    name = "constant" if lesson == "collection" else f"constant-{lesson}"
    for folder, sittings in (("one", [2]), ("two", [1, 2])):
        for until in sittings:
            config = TransformerTrainConfig("constant", 4, 2, 2, start, lesson=lesson)
            train_transformer(tmp_path / folder, config, until)
    one, two = (load_file(tmp_path / f / name / "control.safetensors") for f in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    made, shipped = (ControlledTransformer.open(n).transformer for n in (tmp_path / "one" / name, "constant"))
    gap = max(float((a - b).detach().abs().max()) for a, b in zip(made.parameters(), shipped.parameters(), strict=True))
    assert (gap < 1e-2) == (start is not None)


def test_a_picture_drawn_on_another_device_comes_back():
    prompts, seeds = ["a face"], [3]
    plain = ControlledTransformer.open("constant").draw(prompts, seeds, steps=2)
    with Accelerator():
        moved = ControlledTransformer.open("constant").to(DEVICE).draw(prompts, seeds, steps=2)
    assert moved.device.type == "cpu" and torch.allclose(moved, plain, atol=1e-5)


def test_lessons_show_more_sides_and_no_mirrored_pictures():
    from vitrine.engine.portraits import sample_scenes
    from vitrine.evidence.portraits.transformer import SIDED, _sided

    scenes = sample_scenes(range(2000))
    made = _sided(scenes, 0.75, torch.Generator().manual_seed(0))
    for name, values in SIDED.items():
        left, right = (float((made.column(name) == ATTRIBUTES[name].index(v)).mean()) for v in values)
        assert left + right > 0.75 and abs(left - right) < 0.05
    assert (made.column("hair") == scenes.column("hair")).all()
    told = transformer_data(load_portraits(), 64, kind=Collection(0.0, 0.75)).controls
    assert not told["flip"].any() and told["crop_left"].any()


@pytest.mark.nightly
def test_a_flip_is_taught_against_the_model_itself(tmp_path):
    from vitrine.engine.control.control_trainer import AdvancedControlTrainConfig, ControlTrainConfig
    from vitrine.evidence.control.flip_lessons import FlipLessons

    model = ControlledTransformer.open("power-cosine")
    data = transformer_data(model.portraits, 8, kind=Collection(0.0, 0.75))
    advanced = AdvancedControlTrainConfig(drop_control=0.0, drop_semantics=0.0)
    config = ControlTrainConfig(30, 8, 3e-4, gamma=model.gamma, advanced=advanced)
    lessons = FlipLessons(model, data, config, tmp_path, warmup=1)
    batch, before = lessons.sample_batch(99), [p.clone() for p in lessons.teacher.parameters()]

    def errors():
        """Of plain and mirrored halves: what the student says beside what the teacher says."""
        told = lessons.network
        rows = []
        lessons.network = lambda *args: rows.append(told(*args)) or rows[-1]
        with torch.no_grad():
            whole = float(lessons.loss(batch))
        lessons.network = told
        plain, mirrored = rows[0].chunk(2)
        return whole, float((plain - mirrored.flip(-1)).square().mean())

    start = errors()
    for _ in range(30):
        lessons.step()
    end = errors()
    assert end[0] < 0.9 * start[0] and end[1] < 0.9 * start[1]
    assert all(torch.equal(a, b) for a, b in zip(before, lessons.teacher.parameters(), strict=True))
    lessons.save()
    assert FlipLessons(ControlledTransformer.open("power-cosine"), data, config, tmp_path, warmup=1).done == 30
    with pytest.raises(VitrineError, match="begun with"):  # another teacher
        FlipLessons(model, data, config, tmp_path, warmup=1)


@pytest.mark.nightly
def test_a_run_in_two_sittings_is_the_run_in_one(run, tmp_path):
    transfer_training.transfer(tmp_path, [0], 2, transfer_training.TransferConfig(**SMALL), ["grid-rescaled"])
    one, two = weights(tmp_path), weights(run)
    assert set(one) == set(two) and all(torch.equal(one[k], two[k]) for k in one)
    assert curves_of.read_curves(tmp_path)["grid-rescaled"] == curves_of.read_curves(run)["grid-rescaled"]
    trained = [k for k in one if k.startswith("weight/ctrl")]
    moved = [k for k in trained if not torch.equal(one[k], one["average/" + k.removeprefix("weight/")])]
    assert moved == trained, "the control embedder is trained too"


@pytest.mark.nightly
def test_curves_of_all_arms(run):
    curves = curves_of.read_curves(run)
    assert set(curves) == set(curves_of.ARMS)
    assert all(set(c) == {0, 2} and min(c.values()) > 0 for seeds in curves.values() for c in seeds.values())
    ends = [seeds[0][2] for seeds in curves.values()]
    assert len(set(ends)) == 3, "the arms differ"
    assert curves_of.read_curves(run / "curves.json") == curves
    assert json.loads((run / "curves.json").read_text())["settings"]["pictures"] == 6
    with pytest.raises(VitrineError, match="run it first"):
        curves_of.read_curves(run / "grid-plain-0")


@pytest.mark.nightly
def test_an_exported_model_draws_as_the_averaged_one(run, tmp_path):
    out = transfer_training.export(run, tmp_path / "mine")
    opened = ControlledTransformer.open(str(out))
    assert opened.side == 128
    # Eq. 3 is in the exported scheduler: every sigma doubled
    shipped = NoiseSchedule.from_diffusers(load_portraits().scheduler)
    ratio = NoiseSchedule.from_diffusers(opened.scheduler).sigma(torch.arange(1000)) / shipped.sigma(torch.arange(1000))
    assert torch.allclose(ratio, torch.full_like(ratio, 2.0), rtol=1e-4)
    ema = weights(run)["average/base.proj_out.weight"]
    assert torch.equal(opened.transformer.proj_out.weight, ema.half().float())
    assert opened.draw([PROMPT], [3], steps=2).shape == (1, 3, 128, 128)
    size = sum(p.stat().st_size for p in out.iterdir())
    assert size < 2.5e6
    with pytest.raises(VitrineError, match="resampled positions"):
        transfer_training.export(run, tmp_path / "other", "extrapolated-rescaled")
    with pytest.raises(VitrineError, match="recipe `transfer`"):
        transfer_training.export(run, tmp_path / "other", seed=7)


@pytest.mark.nightly
def test_the_commands(run, tmp_path, capsys):
    copied = tmp_path / "again"
    import shutil

    shutil.copytree(run, copied)
    small = ["--batch", "2", "--pictures", "6", "--samples", "3", "--seeds", "0", "--steps", "2"]
    (copied / "settings.json").write_text(
        json.dumps(transfer_training.TransferConfig(batch=2, pictures=6, samples=3).to_dict())
    )
    assert recipe(["transfer", "--folder", str(copied), *small]) == 0
    assert "extrapolated-rescaled" in capsys.readouterr().out, "finished runs are only read"
    assert recipe(["export", "--folder", str(copied), "--out", str(tmp_path / "m")]) == 0
    assert (tmp_path / "m" / "control.safetensors").is_file()
    assert recipe(["transfer", "--folder", str(copied), *small, "--arms", "none"]) == 2


def test_the_claim_reads_curves():
    seeds = {0: {0: 30.0, 100: 12.0, 400: 8.0}, 1: {0: 30.0, 100: 10.0, 400: 8.0}}
    slow = {0: {0: 40.0, 100: 25.0, 400: 16.0}, 1: {0: 40.0, 100: 25.0, 400: 14.0}}
    plain = {0: {0: 20.0, 100: 18.0, 400: 13.0}, 1: {0: 20.0, 100: 18.0, 400: 13.0}}
    curves = {"grid-rescaled": seeds, "extrapolated-rescaled": slow, "grid-plain": plain}
    result = judged(curves)
    # means 30, 11, 8 cross 15 at 100 * 15 / 19
    assert result.holds and result.value == pytest.approx(100 * 15 / 19 / 400, abs=1e-3)
    assert result.details["extrapolated-rescaled"]["steps to 15.00"] == 400.0
    assert not judged(curves | {"grid-plain": seeds, "grid-rescaled": plain}).holds
    with pytest.raises(VitrineError, match="missing arms"):
        judged({"grid-rescaled": seeds})
    assert curves_of.steps_to_reach({0: 5.0, 50: 3.0}, 1.0) is None and curves_of.steps_to_reach({0: 5.0}, 6.0) == 0.0
    assert "resolution.transfer" in all_claims()


@pytest.mark.nightly
def test_a_quick_claim_measures_the_same_with_fewer_pictures(monkeypatch):
    from vitrine.evidence.control import claims

    monkeypatch.setattr(claims, "QUICK", claims._Counts(2, 4, 16))
    draw, prompts = ControlledTransformer.draw, []

    def counted(self, texts, *args, **settings):
        prompts.extend(texts)
        return draw(self, texts, *args, **settings | {"steps": 2})

    monkeypatch.setattr(ControlledTransformer, "draw", counted)
    result = all_claims()["control.flip"].measure(quick=True)
    assert len(prompts) == 3 * 16 and len(result.details) == 2
    assert result.interval[0] <= result.value <= result.interval[1]
    result = all_claims()["control.cross_size"].measure(quick=True)
    assert len(prompts) == 3 * 16 + 2 * (5 * 2 + 4) and result.interval[0] <= result.value <= result.interval[1]


def test_shipped_and_saved_configs_hold_no_path(tmp_path):
    save_transformer(load_transformer("power-cosine"), tmp_path / "saved")
    for folder in (tmp_path / "saved", *(transformer_folder(n) for n in shipped_transformers())):
        assert not json.loads((folder / "config.json").read_text()).get("_name_or_path"), folder
