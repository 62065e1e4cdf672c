"""Every published file of the lane: read as its author's program reads it, or refused in a sentence."""

import shutil

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.activations import TapConfig, tap_latents
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import value_sites
from vitrine.engine.nemo.neuron_statistics import published_statistics
from vitrine.engine.w2w.loras.lora_files import read_header, read_lora
from vitrine.engine.w2w.loras.near_copies import sketch
from vitrine_tests.families.twin import inputs, network
from vitrine_tests.published.against import against_diffusers, against_lycoris, bare_unet
from vitrine_tests.published.bring import table
from vitrine_tests.published.weights import entry_of, file_of, keep, known

LARGEST = 1e-6
"""Difference to another program's reading, as a share of a layer's largest number."""


def of_kind(*kinds):
    entries = [entry for entry in table() if entry["kind"] in kinds]
    return pytest.mark.parametrize("entry", entries, ids=[f"{e['repository']}/{e['path']}" for e in entries])


def compared(name, figure):
    """A figure against the one of the page, where differences and shares of samples may round otherwise."""
    keep(name, figure)
    written = {k: pytest.approx(v, abs=0.01) if isinstance(v, float) else v for k, v in known().get(name, {}).items()}
    assert figure.get("difference", 0) <= LARGEST
    assert {**figure, "difference": 0} == {**written, "difference": 0}, "write the page: VITRINE_WRITE_DOCS=1"


def measured(path):
    """What becomes of a LoRA file: refused with which sentence, or read with which difference to others' reading."""
    try:
        file = read_header(path)
    except VitrineError as error:
        return {"outcome": "refused", "said": str(error)}
    figure = {"outcome": "read", "layers": len(file.entries), "base": file.base_model, "text": file.text_layers}
    if {entry.kind for entry in file.entries.values()} == {"LoKr"}:
        against, largest, zero = against_lycoris(path, file)
    elif file.dialect.startswith("diffusers"):
        against, largest, zero = against_diffusers(path, file)
    else:
        read_lora(file)
        return figure | {"against": "", "zero": 0}
    return figure | {"against": against, "difference": float(f"{largest:.1g}"), "zero": zero}


@of_kind("LoRA", "LoKr", "twin", "model")
def test_a_lora_is_read_as_its_own_program_reads_it_or_refused(entry):
    figure = measured(file_of(entry))
    assert figure["outcome"] == "refused" or figure["zero"] < figure["layers"] > 1, "nothing was compared"
    compared(f"{entry['repository']}/{entry['path']}", figure)


def test_a_pickle_is_converted_once_and_read(tmp_path):
    """What a user does: read with ``weights_only``, written as safetensors. It has its neighbour's keys and other
    weights."""
    pickled = file_of(entry_of("stable-diffusion-v1.5-lora/pytorch_lora_weights.bin"))
    tensors = torch.load(pickled, weights_only=True, map_location="cpu")
    path = tmp_path / "converted.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    ours, other = (read_lora(p) for p in (path, pickled.with_suffix(".safetensors")))
    assert ours.keys() == other.keys()
    sketches = [
        sketch(lora, {name: tuple(layer.delta().shape) for name, layer in ours.items()}, 16) for lora in (ours, other)
    ]
    cosine = float(torch.nn.functional.cosine_similarity(*sketches, dim=0))
    compared("the pickle, converted", measured(path) | {"cosine": round(cosine, 2)})


def test_settings_next_to_a_text_encoders_adapter_change_nothing_here(tmp_path):
    """Alone in a folder and beside its settings it is named for the same thing."""
    path = file_of(entry_of("weights/sd15/text_encoder/adapter_model.safetensors"))
    file_of(entry_of("weights/sd15/text_encoder/adapter_config.json"))
    shutil.copy(path, tmp_path)
    sentences = [measured(p)["said"] for p in (path, tmp_path / path.name)]
    assert sentences[0] == sentences[1] and "24 text encoder layers" in sentences[0]


def test_nemos_statistics_are_imported_bit_for_bit():
    path = file_of(entry_of("statistics_additional_laion_prompts_v1_4.pt"))
    means, stds = torch.load(path, weights_only=True, map_location="cpu")
    unet = bare_unet("Stable Diffusion 1.x")
    statistics = published_statistics(path, unet)
    addresses = [site.address for site in value_sites(unet)]
    assert list(statistics.means) == addresses and len(means) == len(stds) == len(addresses) == 7
    for ours, theirs in ((statistics.means, means), (statistics.stds, stds)):
        for address, value in zip(addresses, theirs, strict=True):
            assert float(value.abs().max()) > 0 and torch.equal(ours[address], value.float())
    neurons = sum(len(value) for value in means)
    compared("NeMo statistics", {"outcome": "equal bit for bit", "layers": len(addresses), "neurons": neurons})


def test_latents_of_wan_go_through_a_tap():
    path = file_of(entry_of("taehv/examples/test_latents_wan.pth"))
    latents = torch.load(path, weights_only=True, map_location="cpu").float()
    net = network("wan")
    cond = inputs("wan", 1)[2]
    from diffusers import FlowMatchEulerDiscreteScheduler

    denoiser = Denoiser.from_diffusers(net, FlowMatchEulerDiscreteScheduler())
    small = latents[:, :, :3, :16, :24]
    assert latents.shape == (1, 16, 16, 40, 64) and float(small.std()) > 0.1
    config = TapConfig(("auto",), 300.0)
    (tap,) = tap_latents(denoiser, small, cond, config).values()
    (other,) = tap_latents(denoiser, small.flip(-1), cond, config).values()
    assert bool(tap.tensor.isfinite().all()) and not torch.allclose(tap.tensor, other.tensor)
    compared("latents of Wan", {"outcome": "tapped", "shape": list(latents.shape)})
