"""Artefacts travel: a folder with a card, and a repository of a hub that runs on this machine."""

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.activations.presets import PRESETS, FeaturePreset
from vitrine.engine.emd import ONE_STEP, Student
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.hub import CARD, local_file
from vitrine.engine.io.lora_writing import kohya
from vitrine.engine.nemo import Calibration, NeuronSet
from vitrine.engine.nemo.neuron_statistics import NeuronStatistics
from vitrine.engine.w2w import BuildConfig, W2WModel, build_space, load_space
from vitrine_tests.engine.io.hub_stub import hub
from vitrine_tests.engine.small_loras import lora


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    for i in range(4):
        save_file(kohya(lora(i, start=7)), folder / f"{i}.safetensors")
    factors, delta = (build_space(folder, BuildConfig(mode=mode)).space for mode in ("factors", "delta"))
    student = {"lora_unet_a.lora_down.weight": torch.ones(2, 3), "lora_unet_a.lora_up.weight": torch.ones(3, 2)}
    return {
        "neurons": NeuronSet({"mid-vit-block0-cross-v": (1, 5)}, "f", {"prompt": "a hat"}, -0.2),
        "calibration": Calibration(NeuronStatistics({"a": torch.zeros(2)}, {"a": torch.ones(2)}, 24, "f")),
        "preset": FeaturePreset(next(iter(PRESETS.values())), "f"),
        "model": W2WModel(torch.ones(1, 3), factors.identity),
        "factors space": factors,
        "delta space": delta,
        "student": Student(next(iter(ONE_STEP.values())), student),
    }


KINDS = ["neurons", "calibration", "preset", "model", "factors space", "delta space", "student"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_and_a_repository_give_it_back(artefacts, kind, tmp_path, monkeypatch):
    artefact = artefacts[kind]
    content = artefact.save(tmp_path / artefact.FILE).read_bytes()
    read = type(artefact).from_pretrained(artefact.save_pretrained(tmp_path / "kept"))
    assert read.save(tmp_path / artefact.FILE).read_bytes() == content
    with hub(monkeypatch, tmp_path / "cache") as repositories:
        address = artefact.push_to_hub("somebody/shared", token="hf_none")
        assert address.endswith("/somebody/shared/commit/" + "0" * 40)
        assert sorted(repositories["somebody/shared"]) == sorted([CARD, artefact.FILE])
        read = type(artefact).from_pretrained("somebody/shared")
    assert read.save(tmp_path / artefact.FILE).read_bytes() == content


def test_a_card_says_what_it_is_and_its_owners_stays(artefacts, tmp_path, monkeypatch):
    neurons = artefacts["neurons"]
    with hub(monkeypatch, tmp_path / "cache") as repositories:
        neurons.push_to_hub("somebody/shared", token="hf_none")
        card = repositories["somebody/shared"][CARD].decode()
        assert card.startswith("---\nlibrary_name: vitrine\n") and "models/vitrine_neurons" in card
        assert 'NeuronSet.from_pretrained("somebody/shared")' in card
        repositories["somebody/shared"][CARD] = b"my words"
        neurons.push_to_hub("somebody/shared", token="hf_none")
        assert repositories["somebody/shared"][CARD] == b"my words"
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / CARD).write_text("my words")
    neurons.save_pretrained(tmp_path / "kept")
    assert (tmp_path / "kept" / CARD).read_text() == "my words"
    neurons.save_pretrained(tmp_path / "new")
    assert str(tmp_path) not in (tmp_path / "new" / CARD).read_text()


def test_what_is_not_there_is_refused(tmp_path, monkeypatch):
    with hub(monkeypatch, tmp_path / "cache") as repositories:
        repositories["somebody/other"] = {CARD: b""}
        for source in ("nobody/none", "somebody/other"):
            with pytest.raises(VitrineError, match=f"source: given {source}"):
                NeuronSet.from_pretrained(source)
    with pytest.raises(VitrineError, match="folder: given .*one with neurons.json"):
        NeuronSet.from_pretrained(tmp_path)


def test_a_path_is_never_looked_for_in_the_hub(monkeypatch, tmp_path):
    with hub(monkeypatch, tmp_path / "cache"):
        for path in ("loras/student.safetensors", "neurons.json", "/no/such/folder", "a/b/c"):
            assert str(local_file(path, "neurons.json")) == path
        with pytest.raises(VitrineError, match="source: given a/b"):
            local_file("a/b", "neurons.json")


def test_a_linked_space_stays_with_its_files(tmp_path):
    for i in range(3):
        save_file(kohya(lora(i, start=7)), tmp_path / f"{i}.safetensors")
    linked = build_space(tmp_path, BuildConfig(mode="delta", linked=True)).space
    with pytest.raises(VitrineError, match="linked to its LoRA files"):
        linked.save_pretrained(tmp_path / "kept")
    linked.save(tmp_path / "linked.w2w.safetensors")
    assert load_space(tmp_path / "linked.w2w.safetensors").count == 3
