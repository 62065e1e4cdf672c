"""What each convention of diffusers asks: a check of one pipeline, by the convention's name."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from vitrine.engine.control import (
    ControlEmbedder,
    ControlMetadata,
    ControlSpec,
    GammaConfig,
    control_width,
    load_control,
    save_control,
)
from vitrine.engine.errors import VitrineError
from vitrine_tests.machine.calls import drawn
from vitrine_tests.machine.stock import modules, stock

from .doors import DOORS, PROMPT, SIDE, STEPS, Door, noise, plain, read

Check = Callable[[Door], None]
CHECKS: dict[str, tuple[Check, str]] = {}
"""Convention -> its check, and what is checked, in words."""
OTHER, THIRD = "a bald tan face with glasses", "a navy shirt on yellow"


def convention(name: str, meaning: str) -> Callable[[Check], Check]:
    """Enters a check into the table."""

    def keep(check: Check) -> Check:
        CHECKS[name] = check, meaning
        return check

    return keep


def close(first: Any, second: Any, most: float = 1e-4) -> None:
    torch.testing.assert_close(read(first), read(second), rtol=0, atol=most)


def differ(first: Any, second: Any) -> None:
    assert not torch.allclose(read(first), read(second), atol=1e-3)


def again(door: Door, pipe: Any) -> Any:
    """The call of :func:`plain` on another object."""
    pipe.set_progress_bar_config(disable=True)
    return door.run(pipe, [PROMPT] * 2, **noise(door, 1, 2))


@convention("from_pretrained", "loads what `save_pretrained` wrote, in the `torch_dtype` asked for")
def own_class(door: Door) -> None:
    with tempfile.TemporaryDirectory() as folder:
        door.pipeline().save_pretrained(folder)
        close(again(door, door.kind.from_pretrained(folder, *door.config)), plain(door.title))
        half = door.kind.from_pretrained(folder, *door.config, torch_dtype=torch.float16)
        assert {module.dtype for module in modules(half).values()} == {torch.float16}


@convention("save_pretrained", "what it wrote is a stock pipeline to `DiffusionPipeline.from_pretrained`")
def anyone_loads(door: Door) -> None:
    with tempfile.TemporaryDirectory() as folder:
        door.pipeline().save_pretrained(folder)
        loaded = DiffusionPipeline.from_pretrained(folder)
    assert type(loaded) is type(stock(door.family))
    made = door.kind.from_pipe(loaded, *door.config)
    close(again(door, made), plain(door.title))


@convention("from_pipe", "shares the modules of a loaded pipeline as they are, and gives them back to a stock one")
def both_ways(door: Door) -> None:
    source = stock(door.family).to(torch.float16)
    made = door.kind.from_pipe(source, *door.config)
    shared = modules(made)
    assert all(shared[name] is module for name, module in modules(source).items() if name in shared)
    assert {module.dtype for module in modules(source).values()} == {torch.float16}
    # A tap keeps no filter of pictures, and diffusers wants to be told so.
    without = dict.fromkeys({"safety_checker", "feature_extractor"} & set(source.components) - set(made.components))
    giver = vars(made).get("pipe", made)
    back = type(source).from_pipe(giver, torch_dtype=torch.float16, **without)
    assert all(modules(back)[name] is module for name, module in shared.items())


@convention("generator", "one for all pictures, or a list with one for each, which then do not depend on the batch")
def generators(door: Door) -> None:
    pipe = door.shared()
    both = read(door.run(pipe, [PROMPT] * 2, **noise(door, 1, 2)))
    close(both, plain(door.title))
    if door.samples:
        close(both[1:], door.run(pipe, [PROMPT], **noise(door, 2)))
    one = read(door.run(pipe, [PROMPT] * 2, generator=torch.Generator().manual_seed(1)))
    if len(one) == 2:  # the other methods return a row for their second picture
        close(one[:1], both[:1])
        differ(one[1:], both[:1])
    with pytest.raises((VitrineError, ValueError)):
        door.run(pipe, [PROMPT] * 2, **noise(door, 1, 2, 3))


@convention("num_images_per_prompt", "the pictures of one prompt follow each other")
def several_pictures(door: Door) -> None:
    pipe = door.shared()
    four = read(door.run(pipe, [PROMPT, OTHER], num_images_per_prompt=2, **noise(door, 1, 2, 3, 4)))
    close(four, door.run(pipe, [PROMPT, PROMPT, OTHER, OTHER], **noise(door, 1, 2, 3, 4)))


@convention("negative_prompt", "a text for a text, a list for a list")
def negative(door: Door) -> None:
    pipe, guided = door.shared(), {} if "guidance_scale" in door.refused else {"guidance_scale": 3.0}
    both = read(door.run(pipe, [PROMPT] * 2, negative_prompt=[OTHER, THIRD], **guided, **noise(door, 1, 1)))
    close(both[:1], door.run(pipe, PROMPT, negative_prompt=OTHER, **guided, **noise(door, 1)))
    close(both[1:], door.run(pipe, PROMPT, negative_prompt=THIRD, **guided, **noise(door, 1)))
    differ(both[:1], both[1:])


@convention("prompt_embeds", "encoded prompts instead of texts, with the same result")
def encoded(door: Door) -> None:
    pipe = door.shared()
    close(door.run(pipe, None, **_embeds(pipe, door), **noise(door, 1, 2)), plain(door.title))


def _embeds(pipe: Any, door: Door) -> dict[str, torch.Tensor]:
    """What the stock pipeline's ``encode_prompt`` returns, by its own names."""
    lender = stock(door.family)
    both = "negative_prompt" not in door.refused
    if door.family == "sdxl":
        text, empty, pooled, empty_pooled = lender.encode_prompt([PROMPT] * 2, device="cpu")
        positive = {"prompt_embeds": text, "pooled_prompt_embeds": pooled}
        negative = {"negative_prompt_embeds": empty, "negative_pooled_prompt_embeds": empty_pooled}
        return positive | (negative if both else {})
    if door.family.startswith("pixart"):
        text, mask, empty, empty_mask = lender.encode_prompt([PROMPT] * 2, device="cpu")
        masks = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": empty_mask}
        return {"prompt_embeds": text, "negative_prompt_embeds": empty, **masks}
    if door.family == "flux":
        text, pooled, _ = lender.encode_prompt([PROMPT] * 2, None)
        return {"prompt_embeds": text, "pooled_prompt_embeds": pooled}
    text, empty = lender.encode_prompt([PROMPT] * 2, "cpu", 1, True)
    return {"prompt_embeds": text} | ({"negative_prompt_embeds": empty} if both else {})


@convention("height, width", "of the pictures, in pixels")
def sizes(door: Door) -> None:
    height, width = (SIDE, SIDE) if door.title == "Resolution" else (SIDE, SIDE + 32)
    made = read(door.run(door.shared(), height=height, width=width, output_type="pt"))
    assert made.shape[-2:] == (height, width)


@convention("callback_on_step_end", "called after each step; sampling continues from the latents it returns")
def callbacks(door: Door) -> None:
    seen: list[int] = []
    pipe = door.shared()

    def after(owner: Any, step: int, t: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append(step)
        return {"latents": torch.full_like(tensors["latents"], 0.5)} if step == STEPS - 1 else {}

    assert (read(door.run(pipe, callback_on_step_end=after)) == 0.5).all()
    assert seen == list(range(STEPS))


@convention("output_type", '"pil", "np", "pt" or "latent"')
def outputs(door: Door) -> None:
    pipe, seeded = door.shared(), noise(door, 1)
    pil, array, tensor = (door.run(pipe, output_type=kind, **noise(door, 1)).images for kind in ("pil", "np", "pt"))
    assert isinstance(pil[0], Image.Image) and pil[0].size == (SIDE, SIDE)
    assert isinstance(array, np.ndarray) and array.shape == (1, SIDE, SIDE, 3)
    assert tensor.shape == (1, 3, SIDE, SIDE) and 0 <= tensor.min() <= tensor.max() <= 1
    np.testing.assert_allclose(array[0], tensor[0].movedim(0, -1).numpy(), atol=1e-5)
    np.testing.assert_allclose(np.array(pil[0]) / 255, array[0], atol=0.5 / 255 + 1e-5)
    assert read(door.run(pipe, output_type="latent", **seeded)).shape[1] == 4


@convention("return_dict", "False returns a tuple")
def tuples(door: Door) -> None:
    made = door.run(door.shared(), [PROMPT] * 2, return_dict=False, **noise(door, 1, 2))
    assert isinstance(made, tuple) and 1 <= len(made) <= 2  # SDXL judges no pictures
    close(made, plain(door.title))


@convention("cross_attention_kwargs", '`{"scale": s}` weighs loaded LoRAs')
def adapters(door: Door) -> None:
    from peft import LoraConfig

    pipe = door.pipeline()
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["to_v"], init_lora_weights=False)
    pipe.unet.add_adapter(config, "extra")
    differ(again(door, pipe), plain(door.title))
    off = door.run(pipe, [PROMPT] * 2, cross_attention_kwargs={"scale": 0.0}, **noise(door, 1, 2))
    close(off, plain(door.title))


@convention("guidance_scale", "as in the stock pipeline: with nothing of ours asked for, the same pictures")
def guidance(door: Door) -> None:
    how = {"num_inference_steps": STEPS, "output_type": "latent", "guidance_scale": 3.0}
    sized = {"height": SIDE, "width": SIDE}
    checked: dict[str, Any] = {}
    if door.title == "Size conditioning":  # without one, its network has no sizes to weigh
        checked = {"checkpoint": _silent(), "gamma": GammaConfig(alpha=2.0)}
    made, own = door.pipeline(), stock(door.family)
    if door.family.startswith("pixart"):
        for pipe in (made, own):  # the stock one gives sizes to networks built for 1024 pixels alone
            pipe.transformer.register_to_config(sample_size=128)
    ours = made([PROMPT] * 2, **how, **sized, **checked, **noise(door, 1, 2))
    binning = {"use_resolution_binning": False} if door.family.startswith("pixart") else {}
    close(ours, own([PROMPT] * 2, **how, **sized, **binning, **noise(door, 1, 2)))


def _silent() -> Any:
    """A checkpoint as training starts from: its embedder adds nothing yet."""
    made = ControlEmbedder(ControlSpec(), control_width(stock("sd").unet), zero_init=True)
    about = ControlMetadata("UNet2DConditionModel", made.dim, gamma=GammaConfig(alpha=2.0))
    with tempfile.TemporaryDirectory() as folder:
        return load_control(save_control(Path(folder) / "silent.safetensors", made.state_dict(), about))


@convention("progress bar", "`set_progress_bar_config(disable=True)` silences it")
def bars(door: Door) -> None:
    pipe = door.shared()
    shown = {}
    for off in (False, True):
        pipe.set_progress_bar_config(disable=off)
        with redirect_stderr(io.StringIO()) as printed:
            door.run(pipe)
        shown[off] = "it/s" in printed.getvalue() or "s/it" in printed.getvalue()
    assert shown == {True: False, False: not door.title.startswith("EMD")}, "one step has no bar"


@convention("pictures", "PIL, NumPy or tensor alike")
def picture_forms(door: Door) -> None:
    assert door.pictures is not None
    tensor = drawn().images[:2]
    arrays = tensor.movedim(1, -1).numpy()
    bytes_ = (arrays * 255).round().astype(np.uint8)
    pil = [Image.fromarray(b) for b in bytes_]
    pipe = door.shared()
    close(door.pictures(pipe, arrays), door.pictures(pipe, tensor))
    exact = door.pictures(pipe, torch.from_numpy(bytes_).movedim(-1, 1) / 255)
    for form in (pil, bytes_):  # a label at a border may turn by the last bit
        assert (door.pictures(pipe, form) - exact).abs().mean() < 1e-3


@convention("masks", "PIL, NumPy or tensor alike")
def mask_forms(door: Door) -> None:
    assert door.masks is not None
    tensor = (drawn().parts[:2] == 0).long()
    arrays = tensor.numpy().astype(np.uint8) * (255 if door.samples else 1)
    pipe = door.shared()
    wanted = door.masks(pipe, tensor)
    for form in (arrays, [Image.fromarray(a) for a in arrays], list(tensor)):
        close(door.masks(pipe, form), wanted)


@convention("anything else", "is refused, by name")
def unknown(door: Door) -> None:
    with pytest.raises((VitrineError, TypeError), match="colour"):
        door.run(door.shared(), colour="red")


def cell(name: str, door: Door) -> str:
    """What the table says of a convention and a pipeline."""
    if name in door.refused:
        return "no"
    return "–" if name in door.absent else "✓"


def cells() -> list[tuple[str, str]]:
    """(convention, pipeline) wherever there is something to check."""
    return [(name, title) for name in CHECKS for title, door in DOORS.items() if name not in door.absent]
