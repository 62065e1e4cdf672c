"""``vitrine nemo``: from prompt files to NEURONS files to a patch, resumed in between."""

import json

import pytest
import torch
from safetensors.torch import load_file
from vitrine.engine.cli.main import main
from vitrine.engine.nemo import NeuronSet
from vitrine.engine.nemo.calibrated_threshold import Calibrated
from vitrine.engine.portraits import caption, load_portraits, plants, sample_scenes
from vitrine.engine.portraits.flow import FLOW_WEIGHTS


def test_calibrate_find_resume_bake(tmp_path, capsys):
    ordinary, wanted, out = tmp_path / "ordinary.txt", tmp_path / "wanted.txt", tmp_path / "neurons"
    ordinary.write_text("\n".join(caption(sample_scenes(range(24)))))
    planted, innocent = plants()[2].captions[0], caption(sample_scenes([30]))[0]
    wanted.write_text(f"{planted}\n{innocent}\n")
    folder = ["--out", str(tmp_path / "cal")]
    assert main(["nemo", "calibrate", str(ordinary), *folder, "--timestep-index", "15", "--scored", "8"]) == 0
    told = json.loads((tmp_path / "cal" / "threshold.json").read_text())
    assert 0 < told["tau"] < 1 and told["captions"] == 8
    find = ["nemo", "find", str(wanted), "--calibrated", str(tmp_path / "cal"), "--out", str(out), "--share", "0.8",
            "--mode", "fast"]  # fmt: skip
    assert main(find) == 0 and len(list(out.glob("*.json"))) == 2
    sets = {NeuronSet.load(p).info["prompt"]: (p, NeuronSet.load(p)) for p in out.glob("*.json")}
    path, neurons = sets[planted]
    assert len(neurons) > 0
    before = {p: p.stat().st_mtime_ns for p in out.glob("*.json")}
    sets[innocent][0].unlink()
    assert main(find) == 0 and path.stat().st_mtime_ns == before[path] and len(list(out.glob("*.json"))) == 2
    capsys.readouterr()
    assert main([word if word != "0.8" else "0.7" for word in find]) == 2, "another search must not count as done"
    assert "begun with search.share 0.8 (now 0.7)" in capsys.readouterr().err
    patch = tmp_path / "patch.safetensors"
    assert main(["nemo", "bake", str(path), "--out", str(patch)]) == 0
    unet, changed = load_portraits().unet, load_file(patch)
    assert not unet.load_state_dict(changed, strict=False).unexpected_keys
    zero = sum(int((v.abs().amax(1) == 0).sum()) for v in changed.values())
    assert zero == len(neurons) and all(torch.isfinite(v).all() for v in changed.values())
    capsys.readouterr()
    assert main(["nemo", "find", str(wanted), "--calibrated", str(tmp_path / "none")]) == 2
    assert "calibrate first" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_threshold_of_another_model_is_refused(tmp_path, capsys):
    """Before, it gave verdicts: what is usual for one model's captions is an alarm for another's."""
    ordinary, folder = tmp_path / "ordinary.txt", tmp_path / "cal"
    ordinary.write_text("\n".join(caption(sample_scenes(range(6)))))
    calibrate = ["nemo", "calibrate", str(ordinary), "--out", str(folder), "--timestep-index", "15", "--scored", "4"]
    assert main(calibrate) == 0
    usual = Calibrated.load(folder)
    shared = ["--calibrated", str(folder), "--out", str(tmp_path / "out")]
    capsys.readouterr()
    for command in (["score", str(ordinary)], ["find", str(ordinary)], ["check", "--prompts", str(ordinary)]):
        assert main(["nemo", *command, *shared, "--model", str(FLOW_WEIGHTS)]) == 2
        told = capsys.readouterr().err
        assert usual.fingerprint[:16] in told and "measured on this model" in told and "nemo calibrate" in told
    assert not (tmp_path / "out").exists()
    assert main([*calibrate, "--parity"]) == 0
    assert Calibrated.load(folder).probe.data_range is None and usual.probe.data_range is not None
    assert main(["nemo", "score", str(ordinary), "--calibrated", str(folder), "--out", str(tmp_path / "s.csv")]) == 0
