"""One's own folder of LoRAs over one's own checkpoint, here a random one: the panel of the template gives a picture."""

import base64
import time
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from vitrine.engine.portraits.models import WEIGHTS
from vitrine_tests.templates import FOLDER, read, without_boxes

TEMPLATE = "Turn a folder of LoRAs into sliders (your checkpoint)"
LORAS, RANK, EDIT = 8, 2, "13"
PLACES = ("-0.6 -0.4", "0.6 0.4")


def random_unet(width):
    """A small UNet of SD's class as core builds it, without training."""
    from comfy.model_base import BaseModel, ModelType
    from comfy.model_patcher import ModelPatcher
    from comfy.supported_models import SD15

    unet = {"model_channels": 32, "in_channels": 4, "out_channels": 4, "num_res_blocks": [1, 1], "num_heads": 2,
            "channel_mult": [1, 2], "transformer_depth": [0, 1], "transformer_depth_output": [0, 0, 1, 1],
            "transformer_depth_middle": 1, "context_dim": width, "use_spatial_transformer": True,
            "use_linear_in_transformer": False, "image_size": 32}  # fmt: skip
    config = SD15(unet)
    config.set_inference_dtype(torch.float32, None)
    base, noise = BaseModel(config, ModelType.EPS, device="cpu"), torch.Generator().manual_seed(0)
    for name, value in base.diffusion_model.named_parameters():
        fan_in = value[0].numel() if value.ndim > 1 else 1
        start = torch.randn(value.shape, generator=noise) / fan_in**0.5
        value.data = start if value.ndim > 1 else torch.full_like(value, float(name.endswith("weight")))
    cpu = torch.device("cpu")
    return ModelPatcher(base.eval(), load_device=cpu, offload_device=cpu)


def write_loras(model, folder):
    """Random LoRAs on every attention, as a trainer names them."""
    import comfy.lora

    weights = model.model.state_dict()
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    diffusers = ("lora_unet_down_blocks", "lora_unet_mid_block", "lora_unet_up_blocks")
    keys = {k: v for k, v in keys.items() if k.startswith(diffusers) and "attn" in k and isinstance(v, str)}
    folder.mkdir(parents=True)
    for number in range(LORAS):
        noise, tensors = torch.Generator().manual_seed(number), {}
        for key, weight in keys.items():
            out, inside = weights[weight].shape
            tensors[f"{key}.lora_down.weight"] = torch.randn(RANK, inside, generator=noise) / inside**0.5
            tensors[f"{key}.lora_up.weight"] = torch.randn(out, RANK, generator=noise)
            tensors[f"{key}.alpha"] = torch.tensor(float(RANK))
        save_file(tensors, folder / f"person-{number}.safetensors")


@pytest.fixture(scope="module")
def session(comfy, tmp_path_factory):
    """(the panel's session after one run of the template, the MODEL)."""
    import comfy.sd as core
    import folder_paths
    from vitrine.nodes.comfy import people
    from vitrine.nodes.comfy.panel_state import NodeKey
    from vitrine.nodes.comfy.portraits import load_clip, load_vae

    base, clip = tmp_path_factory.mktemp("own"), load_clip(str(WEIGHTS))
    width = clip.encode_from_tokens_scheduled(clip.tokenize("a"))[0][0].shape[-1]
    model = random_unet(width)
    write_loras(model, base / "loras" / "my_loras")
    (base / "checkpoints").mkdir()
    graph = without_boxes(read(FOLDER / "api" / f"{TEMPLATE}.json"))
    name = graph["1"]["inputs"]["ckpt_name"]
    (base / "checkpoints" / name).write_bytes(b"")
    for kind in ("checkpoints", "loras"):
        folder_paths.add_model_folder_path(kind, str(base / kind), is_default=True)
    folder_paths.filename_list_cache.clear()
    graph["4"]["inputs"].update(batch_size=1, width=128, height=128)
    graph["9"]["inputs"].update(steps=2)
    parts = (model, clip, load_vae(str(WEIGHTS)), None)
    load, core.load_checkpoint_guess_config = core.load_checkpoint_guess_config, lambda *a, **k: parts
    try:
        executor = comfy.executor()
        _, error = comfy.run(graph, executor)
        assert error is None, error
        yield people.SESSIONS.find(NodeKey("", "", EDIT)), model
    finally:
        core.load_checkpoint_guess_config = load


def pixels(answer):
    return np.asarray(Image.open(BytesIO(base64.b64decode(answer["picture"])))).astype(int)


def released(session, model, place):
    """(the picture that the panel draws when a hand lets go at a place, forwards of the network)."""
    from vitrine.nodes.comfy import people

    calls = []
    hook = model.model.diffusion_model.register_forward_pre_hook(lambda module, args: calls.append(1))
    try:
        return pixels(people.portrait(session, {"map_position": place}, "", 7)), len(calls)
    finally:
        hook.remove()


def test_a_drag_gives_another_picture_of_ones_own_model(session, record_property):
    """``--junitxml`` keeps the seconds from release to picture, and the network's forwards."""
    from vitrine.nodes.comfy import people

    panel, model = session
    shown = people.laid_out(panel)
    assert shown["draws"] and shown["missing"] == [] and len(shown["points"]) == LORAS
    assert people.portrait(panel, {"map_position": PLACES[0]}, "", 7, released=False) == {"picture": None}
    first, _ = released(panel, model, PLACES[0])
    began = time.perf_counter()
    second, calls = released(panel, model, PLACES[1])
    record_property("seconds", round(time.perf_counter() - began, 2))
    record_property("forwards", calls)
    assert calls == people.RELEASED_STEPS, "both halves of guidance go through the network together"
    assert first.std() > 10 and np.abs(first - second).mean() > 2
    assert np.array_equal(first, released(panel, model, PLACES[0])[0])


def test_a_dot_of_the_map_has_its_loras_picture(session):
    from vitrine.nodes.comfy import people

    faces = [pixels(people.training_portrait(session[0], dot, "", 7)) for dot in (0, 1)]
    assert np.abs(faces[0] - faces[1]).mean() > 2
