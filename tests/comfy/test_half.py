"""Every long node on a model in half precision, as ComfyUI loads one on a GPU, held against float32."""

import sys

import pytest
import torch

pytestmark = pytest.mark.nightly

BOUNDS = {torch.float16: 0.02, torch.bfloat16: 0.15}
"""Largest relative distance (RMS) of a node's tensors from those in float32."""
FREE = {
    "Find Copying Neurons (NEMO)",
    "Find Same Points",
    "Segment Like This",
    "Train One-Step Student (EMD)",
    "Rank Layers",
    "Person from Picture (W2W)",
    "Slider from Pictures (W2W)",
}
"""Their results are choices, or training: a rounding may tip them. They must run and be finite."""


def relative(values, wanted):
    values, wanted = (torch.cat([v.double().flatten() for v in side]) for side in (values, wanted))
    return float((values - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp_min(1e-12))


def in_precision(method, dtype):
    return lambda self, _, manual: method(self, dtype, manual)


@pytest.fixture(scope="module")
def scenes(comfy, beside, tmp_path_factory):
    """A function dtype -> the table of long nodes on the portraits model in that precision."""
    import folder_paths

    hard, made = beside("hard"), {}
    kinds = [
        kind
        for name, module in list(sys.modules.items())
        for kind in vars(module).values()
        if name.endswith(("nodes.comfy.portraits", "nodes.comfy.transformer"))
        and "set_inference_dtype" in dir(kind)
        and isinstance(kind, type)
    ]

    def scene(dtype):
        if dtype not in made:
            folder = tmp_path_factory.mktemp("loras")
            folder_paths.add_model_folder_path("loras", str(folder))
            with pytest.MonkeyPatch.context() as patch:
                for kind in kinds:
                    patch.setattr(kind, "set_inference_dtype", in_precision(kind.set_inference_dtype, dtype))
                made[dtype] = hard.Scene(comfy, folder)
                made[dtype].table = made[dtype].runs()
        return made[dtype]

    return scene


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp16", "bf16"])
def test_every_long_node(scenes, dtype):
    half, whole, distances = scenes(dtype), scenes(torch.float32), {}
    assert half.model.model.diffusion_model.dtype == dtype
    for name, run in half.table.items():
        tensors = run()
        assert all(bool(torch.isfinite(t).all()) for t in tensors), name
        if name not in FREE:
            distances[name] = round(relative(tensors, whole.table[name]()), 4)
    assert {name: d for name, d in distances.items() if d > BOUNDS[dtype]} == {}, distances
    assert max(distances.values()) > 0, "the model was not in half precision"
