"""Recording while a real pipeline samples."""

from __future__ import annotations

import pytest
import torch
from vitrine.engine.activations import DIFFUSERS_GUIDED, tap_steps
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import build_models

Q = "up-level0-repeat0-vit-block0-cross-q"


@pytest.fixture(scope="module")
def pipe() -> object:
    torch.set_num_threads(1)
    pipe = build_models(seed=4).pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sample(pipe: object, steps: int = 4, guidance: float = 3.0) -> torch.Tensor:
    settings = {"num_inference_steps": steps, "guidance_scale": guidance, "height": 64, "width": 64}
    return pipe(["a man", "a hat"], generator=torch.Generator().manual_seed(0), output_type="latent", **settings).images


def test_chosen_steps_both_halves_and_an_unchanged_picture(pipe, no_hooks_left) -> None:
    plain = sample(pipe)
    seen = []
    to_q = pipe.unet.up_blocks[0].attentions[0].transformer_blocks[0].attn2.to_q
    handle = to_q.register_forward_hook(lambda m, i, o: seen.append(o))
    with tap_steps(pipe.unet, Q, steps=(0, 2), rows=DIFFUSERS_GUIDED) as record:
        assert torch.equal(sample(pipe), plain)
    handle.remove()
    no_hooks_left(pipe.unet)
    assert list(record) == [0, 2] and record.calls == 4
    for step in (0, 2):
        for half, expected in zip(("uncond", "cond"), seen[step].chunk(2), strict=True):
            activation = record[step][half][Q]
            assert torch.equal(activation.tensor.flatten(2).transpose(1, 2), expected) and activation.grid == (8, 8)
        assert record[step]["cond"].info.step == step
    assert record.timesteps[0] > record.timesteps[2]
    contrast = record.contrast(2)[Q]
    assert torch.equal(contrast, record[2]["cond"][Q].tensor - record[2]["uncond"][Q].tensor)


def test_without_layout_rows_stay_together(pipe) -> None:
    with tap_steps(pipe.unet, Q, steps=lambda step: step == 1, dtype="float16") as record:
        sample(pipe, guidance=1.0)
    assert list(record) == [1] and list(record[1]) == ["all"]
    assert record[1]["all"][Q].tensor.dtype == torch.float16 and record[1]["all"].rows == 2
    with pytest.raises(VitrineError, match="contrast"):
        record.contrast(1)


def test_separate_calls_for_each_half(pipe) -> None:
    """A sampler that calls the network once for each condition, as ComfyUI does when memory is short."""
    x, text = torch.randn(1, 4, 16, 16), torch.randn(2, 1, 24, 64)
    halves = iter(["cond", "uncond"] * 3)
    with (
        torch.no_grad(),
        tap_steps(pipe.unet, Q, steps=(0, 2), rows=lambda a, k: (next(halves),), count="timesteps") as rec,
    ):
        for t in (800, 500, 200):
            for half in range(2):
                pipe.unet(x, torch.tensor(t), text[half])
    # the layout function is asked at wanted steps only, so it need not be cheap
    assert list(rec) == [0, 2] and rec.calls == 6 and set(rec[2]) == {"cond", "uncond"}
    assert rec.timesteps == {0: 800, 2: 200} and rec.contrast(0)[Q].abs().max() > 0


def test_refusals_and_cleanup(pipe, no_hooks_left) -> None:
    for settings in ({"steps": ()}, {"steps": (-1,)}, {"steps": (0,), "count": "x"}, {"steps": (0,), "dtype": "int8"}):
        with pytest.raises(VitrineError), tap_steps(pipe.unet, Q, **settings):
            pass
    with pytest.raises(VitrineError), tap_steps(pipe.unet, "nowhere", steps=(0,)):
        pass
    with pytest.raises(VitrineError, match="order of the batch"), tap_steps(pipe.unet, Q, (0,), rows=("a", "b", "c")):
        sample(pipe)
    with pytest.raises(KeyboardInterrupt), tap_steps(pipe.unet, Q, (0,)):
        raise KeyboardInterrupt
    no_hooks_left(pipe.unet)
