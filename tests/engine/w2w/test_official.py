"""The published space as it is downloaded: 10,000 components, projections of 1,000 or none, a table of labels."""

import math
from dataclasses import replace

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.cli.main import main
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits.models import SCHEDULER_CONFIG
from vitrine.engine.w2w import (
    InvertConfig,
    SampleConfig,
    closeness,
    contents,
    described,
    direction,
    invert,
    joint_directions,
    load_space,
    nearest,
    quality,
    reach,
    sample,
    score,
    with_directions,
)
from vitrine.engine.w2w.space.official_files import import_official
from vitrine_tests.engine.official_files import official_files

LABELS = ("odd", "big")


@pytest.fixture
def folder(space, tmp_path):
    folder = tmp_path / "official"
    folder.mkdir()
    official_files(space, folder)
    return folder


def label_table(space, folder):
    """What ``pandas.read_pickle('identity_df.pt').to_csv('labels.csv')`` writes: an index without a head, texts."""
    rows = [",file,odd,big"]
    rows += [f"id{i:03},{i}.jpg,{i % 2},{int(space.coefficients[i, 1] > 0)}" for i in range(space.count)]
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")


def denoiser(unet):
    return Denoiser.from_diffusers(unet, DDIMScheduler(**SCHEDULER_CONFIG))


def test_all_components_can_be_sampled_edited_and_described(space, folder, tmp_path, capsys):
    """``--components 0``: projections cover 20 components of 59."""
    target = tmp_path / "all.w2w.safetensors"
    assert main(["w2w", "import-official", str(folder), "--components", "0", "--out", str(target)]) == 0
    assert f"the first 20 with {float(space.explained[:20].sum()):.1%} of the variance" in capsys.readouterr().out
    whole = load_space(target)
    assert whole.dimension == space.dimension and whole.coefficients.shape == (space.count, 20)
    out = tmp_path / "models"
    assert main(["w2w", "sample", str(target), "--seeds", "1", "2", "--out", str(out)]) == 0
    assert len(list(out.glob("*.safetensors"))) == 4 and "nearest training model" in capsys.readouterr().out
    rows = sample(whole, [1, 2])
    few = sample(import_official(folder, 20), [1, 2])
    assert torch.equal(rows[:, 20:], torch.zeros(2, whole.dimension - 20)) and bool(rows[:, :20].any())
    assert few.shape == (2, 20)
    torch.testing.assert_close(rows[:, :20], few, rtol=0.02, atol=1e-3)  # the file holds half precision
    assert "model 1: nearest" in described(whole, rows)


def test_directions_use_the_components_that_are_known(space, folder):
    label_table(space, folder)
    whole, few = import_official(folder, None), import_official(folder, 20)
    y = {"odd": (torch.arange(space.count) % 2).float(), "big": (space.coefficients[:, 1] > 0).float()}
    for label, values in y.items():
        found, wanted = direction(whole, values), direction(few, values)
        torch.testing.assert_close(found[:20], wanted)
        assert not found[20:].any() and abs(reach(whole, found) - reach(few, wanted)) < 1e-3
        assert abs(float(score(found, found)) - 1) < 1e-5
        joint, joint_few = (joint_directions(x, y)[label] for x in (whole, few))
        torch.testing.assert_close(joint[:20], joint_few)
    assert quality(whole, y).accuracy == quality(few, y).accuracy
    labelled = with_directions(whole, joint_directions(whole, y))
    assert sample(labelled, [3], SampleConfig(attributes="joined")).shape == (1, space.dimension)
    assert nearest(whole, whole.coefficients[4:5])[0][0].name == "id004" and closeness(whole) == closeness(few)


def test_without_projections_nothing_is_pretended(space, folder, unet):
    (folder / "proj_1000pc.pt").unlink()
    bare = import_official(folder, None)
    with pytest.raises(VitrineError, match=r"proj_1000pc\.pt"):
        sample(bare, [1])
    assert not sample(bare, [1], SampleConfig(spread=0.0)).any()
    told = contents(bare)
    assert "spread unknown" in told and "100.0%" not in told and "proj_1000pc" in bare.info["note"]
    assert nearest(bare, torch.ones(2, bare.dimension)) == [[], []] and closeness(bare) == 1
    assert "unknown" in described(bare, torch.ones(1, bare.dimension))
    pictures, text = torch.randn(1, 4, 8, 8), Condition(torch.randn(1, 5, 12))
    with pytest.raises(VitrineError, match="prior"):
        invert(denoiser(unet), bare, pictures, text, InvertConfig(steps=2, prior=1e-3))
    assert invert(denoiser(unet), bare, pictures, text, InvertConfig(steps=2)).coefficients.abs().max() > 0


def test_a_prior_where_some_deviations_are_unknown(space, folder, unet):
    whole = import_official(folder, None)
    config = InvertConfig(steps=6, prior=1e-3, check_every=2, lr=0.5)
    found = invert(denoiser(unet), whole, torch.randn(2, 4, 8, 8), Condition(torch.randn(1, 5, 12)), config)
    assert all(math.isfinite(v) for _, losses in found.losses for v in losses)
    assert found.coefficients[:, 20:].abs().min() > 0


def test_a_loss_that_is_no_number_is_said(space, unet):
    with pytest.raises(VitrineError, match="loss"):
        invert(
            denoiser(unet),
            space,
            torch.full((1, 4, 8, 8), math.inf),
            Condition(torch.randn(1, 5, 12)),
            InvertConfig(steps=2, check_every=1),
        )


def test_all_weights_stand_in_for_projections(space, folder):
    with_them = import_official(folder, None)
    (folder / "proj_1000pc.pt").unlink()
    torch.save(space.decode(space.coefficients), folder / "all_weights.pt")
    found = import_official(folder, None)
    assert found.coefficients.shape == (space.count, space.dimension)
    torch.testing.assert_close(found.coefficients[:, :20], with_them.coefficients, atol=2e-3, rtol=0)
    torch.testing.assert_close(found.deviations, space.deviations, atol=1e-3, rtol=1e-3)
    torch.save(torch.zeros(3, 7), folder / "all_weights.pt")
    with pytest.raises(VitrineError, match=r"all_weights\.pt"):
        import_official(folder)


def test_projections_off_centre(space, folder):
    """``sample_weights`` draws each coefficient from the mean and deviation of its column."""
    offset = torch.linspace(-2, 2, 20) * space.deviations[:20]
    table = space.coefficients[:, :20] + offset
    torch.save(table.clone(), folder / "proj_1000pc.pt")
    found = import_official(folder, 20)
    torch.manual_seed(5)
    mean, std = table.mean(0), table.std(0)
    theirs = torch.stack([torch.normal(mean[k], std[k]) for k in range(20)])
    ours = sample(found, [5], SampleConfig(components=20, rng="official"))[0]
    torch.testing.assert_close(found.decode(ours), space.first(20).decode(theirs), atol=1e-5, rtol=1e-4)
    assert "off centre" in found.info["note"] and found.coefficients.mean(0).abs().max() < 1e-4


def test_the_published_labels_make_sliders(space, folder, tmp_path, capsys):
    label_table(space, folder)
    target = tmp_path / "named.w2w.safetensors"
    assert main(["w2w", "import-official", str(folder), "--components", "0", "--out", str(target)]) == 0
    assert load_space(target).names[7] == "id007"
    assert main(["w2w", "label", str(target), str(folder / "labels.csv")]) == 0
    assert set(load_space(target).directions) == set(LABELS) and "held-out accuracy" in capsys.readouterr().out
    # a space that was imported without names: rows by number
    replace(load_space(target), names=()).save(target)
    numbered = tmp_path / "numbered.csv"
    numbered.write_text("name,odd\n" + "\n".join(f"{i},{i % 2}" for i in range(space.count)))
    assert main(["w2w", "label", str(target), str(numbered), "--out", str(tmp_path / "n.safetensors")]) == 0
    torch.testing.assert_close(
        load_space(tmp_path / "n.safetensors").directions["odd"], load_space(target).directions["odd"]
    )
    (folder / "labels.csv").write_text("name,odd\nid000,1\n")
    with pytest.raises(VitrineError, match="one a model"):
        import_official(folder)
