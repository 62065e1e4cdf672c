"""``vitrine nemo``: from prompt files to NEURONS files to a patch, resumed in between."""

import pytest
import torch
from safetensors.torch import load_file
from vitrine.cli.main import main
from vitrine.engine.io.files import read_safetensors, save_safetensors
from vitrine.engine.nemo import Calibration, NeuronSet
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.portraits import caption, load_portraits, plants, sample_scenes


@pytest.mark.nightly
def test_calibrate_find_resume_bake(tmp_path, capsys):
    ordinary, wanted, out = tmp_path / "ordinary.txt", tmp_path / "wanted.txt", tmp_path / "neurons"
    ordinary.write_text("\n".join(caption(sample_scenes(range(24)))))
    memorized, innocent = plants()[2].captions[0], caption(sample_scenes([30]))[0]
    wanted.write_text(f"{memorized}\n{innocent}\n")
    file = tmp_path / "calibration.safetensors"
    assert (
        main(["nemo", "calibrate", str(ordinary), "--out", str(file), "--timestep-index", "15", "--scored", "8"]) == 0
    )
    made = Calibration.load(file)
    assert 0 < made.score.tau < 1 and made.score.count == made.samples.count == 8 and made.statistics.count == 24
    assert sorted(p.name for p in tmp_path.iterdir()) == [file.name, ordinary.name, wanted.name], "no state is left"
    find = ["nemo", "find", str(wanted), "--calibration", str(file), "--out", str(out),
            "--effect-fraction", "0.8", "--mode", "fast"]  # fmt: skip
    assert main(find) == 0 and len(list(out.glob("*.json"))) == 2
    sets = {NeuronSet.load(p).info["prompt"]: (p, NeuronSet.load(p)) for p in out.glob("*.json")}
    path, neurons = sets[memorized]
    assert len(neurons) > 0
    before = {p: p.stat().st_mtime_ns for p in out.glob("*.json")}
    sets[innocent][0].unlink()
    assert main(find) == 0 and path.stat().st_mtime_ns == before[path] and len(list(out.glob("*.json"))) == 2
    refuses_each_other_input(find, file, capsys)
    patch = tmp_path / "patch.safetensors"
    assert main(["nemo", "bake", str(path), "--out", str(patch)]) == 0
    unet, changed = load_portraits().unet, load_file(patch)
    assert not unet.load_state_dict(changed, strict=False).unexpected_keys
    zero = sum(int((v.abs().amax(1) == 0).sum()) for v in changed.values())
    assert zero == len(neurons) and all(torch.isfinite(v).all() for v in changed.values())
    capsys.readouterr()
    assert main(["nemo", "find", str(wanted), "--calibration", str(tmp_path / "none")]) == 2
    assert "calibrate first" in capsys.readouterr().err


def refuses_each_other_input(find, file, capsys):
    """Another search must not count as done."""
    pipes = [NEMOPipeline.from_pipe(load_portraits().pipeline()) for _ in range(3)]
    with torch.no_grad():
        for network in (pipes[1].text_encoder, pipes[2].unet):
            next(p for p in network.parameters() if p.ndim == 1)[0] += 1e-3  # which the fingerprint overlooks

    def scaled(*names):
        def change():
            tensors, metadata = read_safetensors(file)
            wider = {key: 1.01 * v if key.startswith(names) else v for key, v in tensors.items()}
            save_safetensors(file, wider, metadata)

        return change

    others = {
        "search.effect_fraction 0.8 (now 0.7)": (pipes[0], ["--effect-fraction", "0.7"], None),
        "search.mode fast (now parity)": (pipes[0], ["--mode", "parity"], None),
        "search.protocol vitrine (now nemo)": (pipes[0], ["--protocol", "nemo"], None),
        "probe.seed 1 (now 3)": (pipes[0], ["--seed", "3"], None),
        "other text encoder": (pipes[1], [], None),
        "other unet": (pipes[2], [], None),
        "other statistics": (pipes[0], [], scaled("mean/", "std/")),
        "other samples": (pipes[0], [], scaled("places")),
    }
    for said, (pipe, options, change) in others.items():
        kept = file.read_bytes()
        if change is not None:
            change()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vitrine.cli.nemo_commands._pipeline", lambda model, load, pipe=pipe: pipe)
            capsys.readouterr()
            assert main([*find, *options]) == 2, said
        told = capsys.readouterr().err
        assert "begun with" in told and said in told, (said, told)
        file.write_bytes(kept)
