"""The commands that load a model by name, on the shipped model of Flux's shape."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from vitrine.cli.main import main
from vitrine.engine.activations.presets import FeaturePreset
from vitrine.engine.nemo import Calibration, NeuronSet
from vitrine.engine.portraits import caption, render, sample_scenes
from vitrine.engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits
from vitrine.engine.w2w import W2WModel, load_space, read_header, read_lora

MODEL = ["--model", str(FLOW_WEIGHTS)]


@pytest.fixture(scope="module")
def drawn():
    return render(sample_scenes(range(7_910_000, 7_910_004)), 128, details=True)


@pytest.fixture(scope="module")
def pictures(drawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for i, image in enumerate(drawn.images):
        Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["masks", "keypoints"])
def test_places_are_ranked(drawn, pictures, tmp_path, capsys, by):
    if by == "masks":
        labels = tmp_path / "masks"
        labels.mkdir()
        for i, parts in enumerate(drawn.parts):
            Image.fromarray((parts == parts.flatten().mode().values).byte().numpy()).save(labels / f"{i}.png")
    else:
        labels = tmp_path / "points.json"
        points = [[None if p[0] != p[0] else p for p in row] for row in drawn.keypoints.tolist()]
        labels.write_text(json.dumps({f"{i}.png": row for i, row in enumerate(points)}))
    out = tmp_path / "preset.json"
    assert main(["taps", "rank", str(pictures), f"--{by}", str(labels), "--most", "1", "--out", str(out), *MODEL]) == 0
    assert "sites kept" in capsys.readouterr().out
    preset = FeaturePreset.load(out)
    assert preset.preset.model == "FluxTransformer2DModel" and preset.preset.addresses[0].startswith("vit-block")


@pytest.mark.nightly
def test_neurons_are_calibrated_and_baked(tmp_path):
    captions, out = tmp_path / "captions.txt", tmp_path / "calibration.safetensors"
    captions.write_text("\n".join(caption(sample_scenes(range(4)))))
    assert main(["nemo", "calibrate", str(captions), "--out", str(out), "--scored", "2", *MODEL]) == 0
    score = Calibration.load(out).score
    assert score.tau > 0 and score.count == 2
    neurons, patch = tmp_path / "neurons.json", tmp_path / "patch.safetensors"
    NeuronSet({"vit-block0-ctx-v": (1, 5)}, score.fingerprint).save(neurons)
    assert main(["nemo", "bake", str(neurons), "--out", str(patch), *MODEL]) == 0
    net, changed = load_flow_portraits(FLOW_WEIGHTS).transformer, load_file(patch)
    assert not net.load_state_dict(changed, strict=False).unexpected_keys
    weight = net.get_submodule("transformer_blocks.0.attn.add_v_proj").weight
    assert torch.equal((weight == 0).all(1).nonzero().flatten(), torch.tensor([1, 5]))


def test_a_space_is_trained_built_and_inverted_into(drawn, pictures, tmp_path):
    people, loras, space = tmp_path / "people", tmp_path / "loras", tmp_path / "space.w2w.safetensors"
    for i in range(3):
        (people / f"p{i}").mkdir(parents=True)
        (people / f"p{i}" / "0.png").write_bytes((pictures / f"{i}.png").read_bytes())
    train = [
        "w2w",
        "train-loras",
        str(people),
        "--out",
        str(loras),
        "--steps",
        "2",
        "--lr",
        "0.01",
        "--prompt",
        "a face",
    ]
    assert main([*train, "--workers", "1", *MODEL]) == 0
    layers = read_lora(read_header(loras / "p0.safetensors"))
    assert layers and all(float(layer.up.abs().max()) > 0 for layer in layers.values())
    assert main(["w2w", "build", str(loras), "--out", str(space)]) == 0
    out = tmp_path / "inverted"
    invert = ["w2w", "invert", str(space), str(pictures / "3.png"), "--steps", "1", "--prompt", "a face"]
    assert main([*invert, "--out", str(out), *MODEL]) == 0
    (model,) = out.glob("*.w2w*.safetensors")
    assert W2WModel.load(model).belongs(load_space(space)).coefficients.abs().max() > 0
