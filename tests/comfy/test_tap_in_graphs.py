"""Taps in whole graphs of real ComfyUI: the absolute steps of KSampler (Advanced), and a tap that is bypassed."""

import asyncio

import pytest
import torch

SAMPLED = {"seed": 5, "steps": 3, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}


def graph(sampler="KSampler", tap=None, step=-1, **settings):
    """Load, prompt, tap, sample, collect; the picture and the activations' picture are shown."""
    nodes = {
        "1": ("VitrineLoadPortraits", {"model": "portraits, 64 px"}),
        "2": ("CLIPTextEncode", {"text": "a smiling face with navy shirt on blue", "clip": ["1", 1]}),
        "4": ("EmptyLatentImage", {"width": 64, "height": 64, "batch_size": 1}),
        "9": (
            "VitrineTapDuringSampling",
            {"model": ["1", 0], "layers": "mid-vit-out"} | (tap or {"record_steps": "all"}),
        ),
        "11": (
            sampler,
            {"model": ["9", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["4", 0]} | settings,
        ),
        "12": ("VitrineCollectTaps", {"recorder": ["9", 1], "latent": ["11", 0], "step": step, "half": "cond"}),
        "20": ("VAEDecode", {"samples": ["12", 2], "vae": ["1", 2]}),
        "21": ("PreviewImage", {"images": ["20", 0]}),
        "22": ("PreviewImage", {"images": ["12", 1]}),
    }
    return {number: {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in nodes.items()}


def bypassed():
    """What the page sends for a tap in mode 4: its MODEL leads past it, and nothing gives a recorder."""
    nodes = graph(**SAMPLED)
    del nodes["9"], nodes["12"]["inputs"]["recorder"]
    nodes["11"]["inputs"]["model"] = ["1", 0]
    return nodes


def test_without_a_recorder_the_latent_goes_on(comfy):
    shown, error = comfy.run(bypassed())
    assert error is None, error
    assert set(shown["outputs"]) == {"21"}, "what needs the recording is skipped"
    (latent,) = [
        v
        for v in (comfy.call("VitrineCollectTaps", latent={"samples": torch.ones(1)}, step=-1, half="cond"))
        if isinstance(v, dict)
    ]
    assert torch.equal(latent["samples"], torch.ones(1))


@pytest.mark.parametrize("late", [False, True], ids=["whole run", "from step 4"])
def test_absolute_steps(comfy, late):
    """Steps 4 to 8 of KSampler (Advanced): with first_step 4, step 6 is what it is in the whole run."""
    from vitrine.engine.errors import VitrineError

    model, clip, _ = comfy.call("VitrineLoadPortraits")
    with torch.inference_mode():
        positive = clip.encode_from_tokens_scheduled(clip.tokenize("a smiling face"))
    advanced = comfy.nodes.NODE_CLASS_MAPPINGS["KSamplerAdvanced"]()
    latent = {"samples": torch.zeros(1, 4, 16, 16)}

    def run(patched, start, end, latent, noise):
        told = (noise, 5, 8, 2.0, "euler", "normal", positive, positive, latent, start, end, "enable")
        with torch.inference_mode():
            return advanced.sample(patched, *told)[0]

    whole, recorder = comfy.call("VitrineTapDuringSampling", model=model, layers="mid-vit-out", record_steps="4 6")
    run(whole, 0, 8, latent, "enable")
    expected = recorder.activations(6, "cond")
    if late:
        half = run(model, 0, 4, latent, "enable")
        told = {"model": model, "layers": "mid-vit-out", "record_steps": "4 6", "first_step": 4}
        tapped, recorder = comfy.call("VitrineTapDuringSampling", **told)
        run(tapped, 4, 8, half, "disable")
    taps = recorder.activations(6, "cond")
    assert list(recorder.record) == [4, 6] and taps.info.step == 6 and taps.info.timestep == expected.info.timestep
    assert torch.allclose(taps["mid-vit-out"].tensor, expected["mid-vit-out"].tensor, atol=1e-4)
    with pytest.raises(VitrineError, match="step"):
        recorder.activations(2, "cond")


async def _in_the_page(driver, address):
    """Load the graph, bypass its tap, run it: the entry in the history, and our scripts' faults."""
    async with driver.page(address) as tab:
        import json

        await tab.evaluate(f"app.loadApiJson({json.dumps(graph(**SAMPLED))}, 'tap')")
        await tab.wait_for("app.graph._nodes.length === 9")
        await tab.evaluate("app.graph._nodes.find(n => n.comfyClass === 'VitrineTapDuringSampling').mode = 4; null")
        await tab.settle()
        return await tab.run(address), tab.faults()


@pytest.mark.nightly
def test_a_bypassed_tap_in_the_page(driver, address):
    entry, faults = asyncio.run(_in_the_page(driver, address))
    assert entry["status"]["status_str"] == "success" and set(entry["outputs"]) == {"21"}
    assert not faults
