"""Calibrated sliders: even in what is seen, kept in the space's file, the same at every door; off is as before."""

import pytest
import torch
from vitrine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import (
    EditConfig,
    StrengthMap,
    W2WModel,
    WeightSpace,
    edit,
    edit_step,
    fit_strengths,
    load_space,
    start_of,
    strength_map,
    with_directions,
    with_strength_maps,
)


@pytest.fixture
def labelled(space):
    return with_directions(space, {"beard": space.deviations.clone()})


def test_positions_share_out_a_sigmoid():
    strengths = [0.1 * i for i in range(61)]
    curve = [float(torch.sigmoid(torch.tensor(4 * (s - 3)))) for s in strengths]
    fitted = fit_strengths(strengths, curve, start=700)
    seen = [float(torch.sigmoid(torch.tensor(4 * (s - 3)))) for s in fitted.strengths]
    assert seen == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.01)
    assert fitted.strengths[1] > 2 and fitted.start == 700


def test_noise_does_not_turn_a_slider_back():
    fitted = fit_strengths([0, 1, 2, 3, 4], [0.1, 0.05, 0.5, 0.4, 0.9])
    assert list(fitted.strengths) == sorted(fitted.strengths)
    # least squares: 0.075, 0.075, 0.45, 0.45, 0.9
    assert fitted.at(0.5) == pytest.approx(3 + (0.4875 - 0.45) / 0.45) and fitted.at(1.0) == 4


def test_a_slider_ends_where_others_begin_to_change():
    strengths, curve = [0, 1, 2, 3, 4], [0.0, 0.2, 0.4, 0.6, 0.8]
    fitted = fit_strengths(strengths, curve, others=[0, 0.02, 0.04, 0.12, 0.2], limit=0.08)
    assert fitted.strengths == pytest.approx((0, 0.625, 1.25, 1.875, 2.5))
    whole = fit_strengths(strengths, curve)
    assert fit_strengths(strengths, curve, others=[0, 0.01, 0.05, 0.04, 0.08], limit=0.08) == whole
    # others change before the attribute has risen: cut there, the slider would do nothing
    assert fit_strengths(strengths, curve, others=[0, 0.1, 0.2, 0.3, 0.3], limit=0.08) == whole
    with pytest.raises(VitrineError, match="others"):
        fit_strengths(strengths, curve, others=[0, 0.1])


def test_a_position_moves_a_model_as_the_strength_it_stands_for(labelled, tmp_path):
    calibrated = with_strength_maps(labelled, {"beard": StrengthMap((0.0, 2.0, 3.0))})
    assert calibrated.identity == labelled.identity
    kept = WeightSpace.load(calibrated.save(tmp_path / "space.safetensors"))
    model = kept.coefficients[:2]
    on, off = EditConfig(calibrated=True), EditConfig()
    for position, strength in ((0.25, 1.0), (0.5, 2.0), (1.0, 3.0)):
        assert torch.equal(edit(kept, model, {"beard": position}, on), edit(kept, model, {"beard": strength}, off))
    assert torch.equal(edit(kept, model, {"beard": 0.0}, on), model)
    # off: the map is not looked at
    assert torch.equal(edit(kept, model, {"beard": 0.5}), edit(labelled, model, {"beard": 0.5}))


def test_calibrated_sliders_begin_where_they_were_calibrated(labelled, tmp_path):
    """The map's timestep was stored and never used."""
    other = with_directions(labelled, {"hat": labelled.deviations.flip(0)})
    maps = {"beard": StrengthMap((0.0, 2.0), 700.0), "hat": StrengthMap((0.0, 1.0), 850.0)}
    space, on = with_strength_maps(other, maps), EditConfig(calibrated=True)
    assert start_of(space, {"beard": 0.5}, on) == 700
    assert start_of(space, {"beard": 0.5, "hat": 0.5}, on) == 850, "one edited model: the earlier start"
    assert start_of(space, {"beard": 0.5, "hat": 0.0}, on) == 700
    assert start_of(space, {"beard": 0.5}, EditConfig(calibrated=True, start=400)) == 400
    assert start_of(space, {"beard": 0.5}) == start_of(space, {}, on) == 1000
    assert edit_step(space, {"beard": 0.5}, on) == {"edit": {"beard": 1.0}, "start": 700.0}
    assert edit_step(space, {"beard": 0.5}) == {"edit": {"beard": 0.5}}
    model = W2WModel(space.coefficients[:1], space.identity)
    moved = model.moved_to(space.coefficients[1:2], **edit_step(space, {"beard": 0.5}, on))
    assert model.start == 1000 and W2WModel.load(moved.save(tmp_path / "m.w2wmodel.safetensors")).start == 700


def test_a_table_of_readings_calibrates_a_space(labelled, tmp_path, capsys):
    path, table = labelled.save(tmp_path / "space.w2w.safetensors"), tmp_path / "readings.csv"
    table.write_text("label,strength,reading\nbeard,0,0.1\nbeard,2,0.5\nbeard,1,0.2\n")
    assert main(["w2w", "calibrate", str(path), str(table), "--start", "700", "--dtype", "float32"]) == 0
    assert "beard" in capsys.readouterr().out
    fitted = strength_map(WeightSpace.load(path), "beard")
    assert fitted == fit_strengths([0, 1, 2], [0.1, 0.2, 0.5], 700)
    table.write_text("label,strength,reading\nbeard,0,low\n")
    assert main(["w2w", "calibrate", str(path), str(table)]) == 2
    assert main(["w2w", "calibrate", str(path)]) == 2
    assert main(["w2w", "calibrate", str(path), "--portraits", "--labels", "wooden leg"]) == 2


@pytest.mark.parametrize("position", [-0.1, 1.01, float("nan")])
def test_positions_beyond_the_map_are_refused(labelled, position):
    calibrated = with_strength_maps(labelled, {"beard": StrengthMap((0.0, 2.0))})
    with pytest.raises(VitrineError):
        edit(calibrated, calibrated.coefficients, {"beard": position}, EditConfig(calibrated=True))


def test_what_has_no_map_is_refused(labelled):
    with pytest.raises(VitrineError, match="not calibrated"):
        edit(labelled, labelled.coefficients, {"beard": 0.5}, EditConfig(calibrated=True))
    with pytest.raises(VitrineError, match="strength maps"):
        with_strength_maps(labelled, {"glasses": StrengthMap((0.0, 1.0))})
    with pytest.raises(VitrineError, match="rise"):
        fit_strengths([0, 1, 2], [0.5, 0.4, 0.3])
    with pytest.raises(VitrineError, match="strength map"):
        StrengthMap((0.0, 2.0, 1.0))
    assert strength_map(with_strength_maps(labelled, {"beard": StrengthMap((0.0, 1.0))}), "beard").at(0.5) == 0.5


def test_the_command_line_takes_positions_and_records_deviations(labelled, tmp_path):
    calibrated = with_strength_maps(labelled, {"beard": StrengthMap((0.0, 2.0, 3.0))})
    path = calibrated.save(tmp_path / "space.w2w.safetensors")
    name, models = calibrated.names[0], []
    for slider, switch in (("beard=0.5", ["--calibrated"]), ("beard=2", [])):
        out = tmp_path / slider
        assert main(["w2w", "edit", str(path), name, "--edits", slider, "--out", str(out), *switch]) == 0
        models.append(W2WModel.load(next(out.glob("*.w2wmodel.safetensors"))))
    assert torch.equal(models[0].coefficients, models[1].coefficients)
    assert models[0].history[-1] == models[1].history[-1] == {"edit": {"beard": 2.0}}
    assert main(["w2w", "edit", str(path), name, "--edits", "beard=2", "--calibrated", "--out", str(tmp_path)]) == 2


def test_every_slider_of_the_shipped_people_that_the_classifier_sees_is_calibrated():
    """Positions rise and end within the space's reach; shapes of the face are lengths, which no classifier judges."""
    space = load_space(PEOPLE_SPACE)
    shapes = {"eye distance", "eye size", "hair volume", "head width", "mouth width", "nose width"}
    maps = {label: strength_map(space, label) for label in space.directions if label not in shapes}
    assert len(maps) == 22 and all(len(m.strengths) == 5 and 0 < m.strengths[-1] < 8 for m in maps.values())
