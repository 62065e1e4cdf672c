"""Person from Picture (W2W) in real ComfyUI: the pipeline's numbers, interruptions, posterior samples."""

import shutil
from pathlib import Path

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import load_portraits
from vitrine.engine.w2w import InvertConfig, W2WModel
from vitrine_tests.comfy.w2w.scene import PROMPT


def test_inversion_equals_the_pipelines(comfy, loaded, pipe, space, positive):
    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    told = {"steps": 4, "lr": 0.5, "batch": 2, "components": 20, "prior": 0.0, "seed": 1}
    found, report = comfy.call(
        "VitrineW2WInvert",
        model=loaded[0],
        vae=loaded[2],
        positive=positive,
        space=space,
        image=image,
        preset="custom",
        **told,
        mask=torch.ones(1, 64, 64),
    )
    config = InvertConfig(20, 4, 0.5, 2, seed=1, antithetic=True)
    pipe.scheduler = load_portraits().scheduler
    theirs, _ = pipe.invert_image(space, image.permute(0, 3, 1, 2), PROMPT, config, mask=torch.ones(1, 64, 64))
    torch.testing.assert_close(found.coefficients, theirs.coefficients, atol=2e-3, rtol=1e-2)
    assert "held-out loss" in report
    with pytest.raises(VitrineError, match="mask"):
        comfy.call(
            "VitrineW2WInvert",
            model=loaded[0],
            vae=loaded[2],
            positive=positive,
            space=space,
            image=image,
            preset="quick",
            **told,
            mask=torch.ones(1, 32, 32),
        )


def test_samples_are_of_the_vaes_posterior(comfy, loaded, pipe, space, positive):
    """Means and deviations are the pipeline's; the node trains on other latents than the means."""
    from vitrine.engine.activations.picture_latents import encode_pixels
    from vitrine.engine.pipelines.w2w_jobs import _deviations
    from vitrine.nodes.comfy.model import encode
    from vitrine.nodes.w2w_make import _posterior

    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    pixels = image.permute(0, 3, 1, 2) * 2 - 1
    with torch.no_grad():
        ours = _posterior(loaded[0], loaded[2], image, encode(loaded[0], loaded[2], image))
        means = encode_pixels(pipe.vae, pixels)
        deviations = _deviations(pipe._adapter, pixels, means)
    torch.testing.assert_close(ours.means, means, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(ours.deviations, deviations, atol=2e-3, rtol=2e-2)
    told = {"steps": 2, "lr": 0.5, "batch": 2, "components": 5, "prior": 0.0, "seed": 1, "preset": "custom"}
    told |= {"model": loaded[0], "vae": loaded[2], "positive": positive, "space": space, "image": image}
    mean, sampled = (comfy.call("VitrineW2WInvert", **told, posterior=p)[0] for p in ("mean", "sample"))
    assert not torch.equal(mean.coefficients, sampled.coefficients)


def test_interrupting_an_inversion_stops_the_run_and_saves_the_best(comfy, loaded, space, positive):
    """The user's Cancel is noticed inside a network call, within one step; nothing runs downstream."""
    import comfy.model_management as management
    import folder_paths

    calls = []

    def press(*_):
        calls.append(1)
        if len(calls) == 4:
            management.interrupt_current_processing(True)

    handle = loaded[0].model.diffusion_model.register_forward_hook(press)
    try:
        with pytest.raises(management.InterruptProcessingException):
            comfy.call(
                "VitrineW2WInvert", model=loaded[0], vae=loaded[2], positive=positive, space=space,
                image=torch.rand(1, 64, 64, 3), preset="photo", steps=1, lr=0.1, batch=1, components=0, prior=0.0,
                seed=0,
            )  # fmt: skip
    finally:
        handle.remove()
        management.interrupt_current_processing(False)
    best = Path(folder_paths.get_folder_paths("vitrine_w2w")[0]) / "interrupted.w2wmodel.safetensors"
    assert len(calls) <= 6 and float(W2WModel.load(best).coefficients.abs().max()) > 0
    for state in best.parent.glob("inversion-*"):
        shutil.rmtree(state)


@pytest.mark.nightly
def test_an_interrupted_inversion_goes_on(comfy, loaded, space, positive, monkeypatch):
    """The same inputs again: steps already made are not made anew, and the result is that of one run, bit for bit."""
    import comfy.model_management as management
    import folder_paths
    from vitrine.engine.w2w.edit import inversion

    inputs = {
        "model": loaded[0], "vae": loaded[2], "positive": positive, "space": space, "preset": "custom", "steps": 8,
        "image": torch.rand(2, 64, 64, 3, generator=torch.Generator().manual_seed(2)), "lr": 0.5, "batch": 1,
        "components": 9, "prior": 0.0, "seed": 5, "together": True,
    }  # fmt: skip
    steps, step, stop_at = [], inversion._State.step, [5]

    def counted(run):
        step(run)
        steps.append(run.done)
        if run.done == stop_at[0]:
            management.interrupt_current_processing(True)

    monkeypatch.setattr(inversion._State, "step", counted)
    folder = Path(folder_paths.get_folder_paths("vitrine_w2w")[0])
    try:
        with pytest.raises(management.InterruptProcessingException):
            comfy.call("VitrineW2WInvert", **inputs)
    finally:
        management.interrupt_current_processing(False)
    assert len(list(folder.glob("inversion-*/state.safetensors"))) == 1
    stop_at[0], first = -1, steps[-1]
    resumed, _ = comfy.call("VitrineW2WInvert", **inputs)
    assert first in (5, 6) and steps == list(range(1, 9)), "goes on from the stopped step"
    assert resumed.coefficients.shape[0] == 1, "two pictures together are one model"
    assert not list(folder.glob("inversion-*")), "a finished run leaves nothing"
    steps.clear()
    whole, _ = comfy.call("VitrineW2WInvert", **inputs)
    assert steps == list(range(1, 9)) and torch.equal(whole.coefficients, resumed.coefficients)
