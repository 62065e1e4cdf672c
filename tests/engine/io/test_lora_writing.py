"""Every file that the one writer of LoRAs makes loads in diffusers and changes what the network does."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.emd import StudentPreset
from vitrine.engine.emd.export import export
from vitrine.engine.io.lora_writing import of_peft
from vitrine.engine.portraits.models import build_models
from vitrine.engine.w2w import build_space, materialise, read_lora, write_lora
from vitrine_tests.engine.small_loras import deltas, lora, same

AROUND = (
    "unet.base_model.model.",
    "base_model.model.unet.",
    "base_model.model.",
    "unet.module.",
    "module.",
    "diffusion_model.",
    "model.diffusion_model.",
    "unet._orig_mod.",
    "base_model.model.module._orig_mod.",
    "unet.",
    "",
)
"""What trainers and wrappers put before a network's own names."""


@pytest.fixture(scope="module")
def network():
    return build_models(0).unet


def on(network, seed=1, rank=2):
    """A LoRA on the network's attention."""
    layers = {n: m for n, m in network.named_modules() if n.endswith(("attn1.to_q", "attn2.to_v"))}
    return lora(seed, rank, 3.0, {n: tuple(m.weight.shape) for n, m in layers.items()}, strength=0.3)


def seen(network, path):
    """The changes of weights that diffusers makes of a file."""
    pipe = build_models(0).pipeline()
    pipe.unet = copy.deepcopy(network)
    pipe.load_lora_weights(str(path))
    modules = pipe.unet.named_modules()
    return {n: m.get_delta_weight("default_0") for n, m in modules if hasattr(m, "get_delta_weight")}


def test_names_with_wrappers_are_read_and_written_without(network, tmp_path):
    wanted, first = on(network), None
    for number, prefix in enumerate(AROUND):
        tensors = {}
        for path, layer in wanted.items():
            tensors |= {
                f"{prefix}{path}.lora_A.weight": layer.down,
                f"{prefix}{path}.lora_B.weight": layer.up * layer.scale,
            }
        theirs = tmp_path / f"theirs{number}.safetensors"
        save_file(tensors, theirs)
        assert same(deltas(read_lora(theirs)), deltas(wanted)), prefix
        ours = write_lora(tmp_path / f"ours{number}.safetensors", read_lora(theirs))
        first = ours if first is None else first
        assert ours.read_bytes() == first.read_bytes(), prefix
    assert same(seen(network, first), deltas(wanted))


def test_a_space_of_such_files_exports_what_loads(network, tmp_path):
    for seed in range(3):
        tensors = {}
        for path, layer in on(network, seed).items():
            stem = f"unet.base_model.model.{path}"
            tensors |= {f"{stem}.lora_A.weight": layer.down, f"{stem}.lora_B.weight": layer.up * layer.scale}
        save_file(tensors, tmp_path / f"m{seed}.safetensors")
    space = build_space(tmp_path).space
    for dialect in ("kohya", "diffusers"):
        model = materialise(space, space.coefficients[1].float())
        changes = seen(network, write_lora(tmp_path / "out" / f"{dialect}.safetensors", model, dialect))
        assert same(changes, deltas(on(network, 1)), 1e-4) and all(v.any() for v in changes.values())


def test_students_are_written_alike_in_both_dialects(network, tmp_path):
    adapter = {}
    for path, layer in on(network).items():
        stem, exact_in_half = f"{path}.lora_%s.generator.weight", lambda m: m.half().float()
        adapter |= {stem % "A": exact_in_half(layer.down), stem % "B": exact_in_half(layer.up)}
    wanted = deltas(of_peft(adapter))
    files = export(tmp_path, adapter, "generator", StudentPreset())
    assert [f.name for f in files] == ["generator_kohya.safetensors", "generator_diffusers.safetensors"]
    for file in files:
        assert same(seen(network, file), wanted) and same(deltas(read_lora(file)), wanted)
    assert all(torch.isfinite(v).all() for v in wanted.values())
