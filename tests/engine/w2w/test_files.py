"""Models, labels and the published artefacts as files."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import (
    EditConfig,
    SampleConfig,
    W2WModel,
    edit,
    edit_step,
    sample,
)
from vitrine.engine.w2w.space.labels import parse_labels, read_table
from vitrine.engine.w2w.space.official_files import import_official
from vitrine_tests.engine.official_files import official_files


def test_models_as_files(space, tmp_path):
    model = W2WModel(sample(space, [1, 2]), space.identity, ({"sample": {"seeds": [1, 2]}},))
    edited = edit(space, model.coefficients, {"odd": 1.0})
    path = model.moved_to(edited, edit={"odd": 1.0}).save(tmp_path / "m.safetensors")
    back = W2WModel.load(path)
    assert len(back) == 2 and back.history[1]["edit"] == {"odd": 1.0} and len(back[1]) == 1
    assert back.belongs(space) is back and back.start == 1000
    late = EditConfig(start_timestep=700)
    assert edit_step({"odd": 1.0}) == {"edit": {"odd": 1.0}}
    moved = model.moved_to(edited, **edit_step({"odd": 1.0}, late)).save(tmp_path / "late.safetensors")
    assert W2WModel.load(moved).start == 700
    with pytest.raises(VitrineError, match="space"):
        back.belongs(space.first(5))
    with pytest.raises(VitrineError, match="vitrine w2w export"):
        W2WModel.load(tmp_path / "w2wmodel.pt")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(VitrineError, match=r"m\.safetensors"):
        W2WModel.load(path)


def test_labels_from_text_and_csv(space, tmp_path):
    y = parse_labels("m0* 1\nm1*, 0\nm05: 3", space.names)
    assert y[0] == 1 and y[12] == 0 and y[5] == 3 and bool(y[40].isnan())
    with pytest.raises(VitrineError, match="label line"):
        parse_labels("nobody 1", space.names)
    table = tmp_path / "labels.csv"
    table.write_text("name,beard,age\nm00,1,30\nm01.safetensors,0,\n")
    found = read_table(table, space.names)
    assert found["beard"][0] == 1 and found["age"][0] == 30 and bool(found["age"][1].isnan())
    table.write_text("name,beard\nsomebody,1\n")
    with pytest.raises(VitrineError, match="somebody"):
        read_table(table, space.names)


def test_import_of_the_published_files(space, tmp_path):
    official_files(space, tmp_path)
    found = import_official(tmp_path, 20)
    beta = sample(space, [1], SampleConfig(components=20))[0, :20]
    torch.testing.assert_close(found.decode(beta), space.decode(beta), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.encode(space.decode(beta)), beta, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.deviations, space.deviations[:20], atol=1e-4, rtol=1e-3)
    assert "3 negative" in found.info["note"] and found.count == space.count
    wide = import_official(tmp_path, None)
    assert wide.dimension == space.dimension and wide.coefficients.shape == (space.count, 20)
    assert [layer.offset for layer in found.manifest] == [layer.offset for layer in space.manifest]


def test_pickles_are_never_opened(space, tmp_path):
    official_files(space, tmp_path)

    class Evil:
        def __reduce__(self):
            return (print, ("unpickled!",))

    torch.save({"weights": Evil()}, tmp_path / "mean.pt")
    with pytest.raises(VitrineError, match=r"mean\.pt"):
        import_official(tmp_path)
    (tmp_path / "mean.pt").unlink()
    with pytest.raises(VitrineError, match="without"):
        import_official(tmp_path)
