"""Check for Copies (NEMO) in ComfyUI: copies named, files written, interrupted within a step, a LoRA to take off."""

from pathlib import Path

import pytest
import torch
from vitrine.engine.copies.nearest import thumbnails
from vitrine.engine.portraits import caption, plants, render, sample_scenes

PLANTS = plants()[:2]
PICTURES = torch.cat([render(p.scenes).images for p in PLANTS]).permute(0, 2, 3, 1)
ORDINARY = "\n".join(caption(sample_scenes(range(8_400_000, 8_400_003))))
SETTINGS = {
    "latent": {"samples": torch.zeros(2, 4, 16, 16)},
    "ordinary": ORDINARY,
    "seeds": 2,
    "first_seed": 2000,
    "steps": 4,
    "cfg": 3.0,
    "sampler_name": "euler",
    "scheduler": "ddim_uniform",
    "tau": 0.85,
    "timestep_index": 15,
}
PROMPTS = f"{PLANTS[1].captions[0]}\n{PLANTS[1].controls[0]}"


@pytest.fixture(scope="module")
def inputs(comfy):
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    return {"model": model, "clip": clip, "vae": vae, "prompts": PROMPTS, "pictures": PICTURES, **SETTINGS}


def test_copies_are_named_shown_and_written(comfy, inputs):
    report, shown, folder = comfy.call("VitrineNEMOCopyCheck", **inputs, name="planted")
    assert "1 of 2 prompts" in report and "nearest picture 2" in report
    assert shown.shape == (2, 64, 192, 3) and float((shown[0, :, :64] - shown[0, :, 128:]).abs().mean()) < 0.05
    assert (Path(folder) / "copies.html").is_file() and (Path(folder) / "copies.csv").read_text().count("\n") == 3
    again, same, _ = comfy.call("VitrineNEMOCopyCheck", **inputs, name="planted")
    assert again == report and torch.equal(same, shown)
    with pytest.raises(ValueError, match="begun with"):
        comfy.call("VitrineNEMOCopyCheck", **inputs | {"cfg": 4.0}, name="planted")
    (skipped,) = comfy.nodes.NODE_CLASS_MAPPINGS["CLIPSetLastLayer"]().set_last_layer(inputs["clip"], -2)
    with pytest.raises(ValueError, match="begun with other CLIP"):
        comfy.call("VitrineNEMOCopyCheck", **inputs | {"clip": skipped}, name="planted")
    guided = inputs["model"].clone()
    guided.set_model_sampler_cfg_function(lambda given: given["uncond"] + 2 * (given["cond"] - given["uncond"]))
    with pytest.raises(ValueError, match="begun with other model"):
        comfy.call("VitrineNEMOCopyCheck", **inputs | {"model": guided}, name="planted")
    with pytest.raises(ValueError, match="file name"):
        comfy.call("VitrineNEMOCopyCheck", **inputs, name="../elsewhere")


def test_pictures_of_another_size_are_fitted_as_trainers_fit_them(inputs):
    """Twice as large, wider, with transparency: the middle of each, at the samples' size."""
    from vitrine.nodes.comfy.copies import Models, training_pictures

    models = Models(inputs["model"], inputs["clip"], inputs["vae"])
    large = PICTURES.repeat_interleave(2, 1).repeat_interleave(2, 2)
    wide = torch.nn.functional.pad(large, (0, 0, 32, 32))
    alpha = torch.cat([wide, torch.zeros_like(wide[..., :1])], -1)
    for images in (PICTURES, large, wide, wide.movedim(1, 2).contiguous().movedim(1, 2), alpha):
        fitting = training_pictures(images).cropped(models.size(inputs["latent"]))
        for number, picture in enumerate(PICTURES.movedim(-1, 1)):
            torch.testing.assert_close(thumbnails(fitting.read(number)[None])[0], picture, atol=1e-6, rtol=0)
    tall = models.size({"samples": torch.zeros(1, 4, 32, 16)})
    assert tall == (128, 64) and training_pictures(wide).cropped(tall).read(0).shape[-2:] == (128, 64)


def test_each_row_says_what_stands_in_it_and_the_output_is_left_alone(comfy, inputs):
    import folder_paths
    from PIL import Image
    from vitrine.nodes.captions import LINE

    node = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineNEMOCopyCheck"]
    with torch.inference_mode():
        answer = node.execute(**inputs, name="planted")
    _, rows, _ = answer.result
    shown = answer.ui["images"]
    assert len(shown) == len(rows) == 2 and answer.ui["text"]
    with Image.open(Path(folder_paths.get_temp_directory()) / shown[0]["filename"]) as opened:
        assert opened.size == (2 * rows.shape[2], 2 * rows.shape[1] + 2 * LINE)
        captions = opened.convert("L").crop((0, 0, opened.width, 2 * LINE))
        assert captions.crop((0, 0, opened.width, LINE)).getextrema()[1] > 200 < captions.getextrema()[1]


def test_samples_are_those_of_core_and_the_score_is_that_of_its_node(comfy, inputs):
    import csv

    from PIL import Image

    _, _, folder = comfy.call("VitrineNEMOCopyCheck", **inputs, name="planted")
    row = next(csv.DictReader((Path(folder) / "copies.csv").read_text().splitlines()))
    nodes = comfy.nodes.NODE_CLASS_MAPPINGS
    with torch.inference_mode():
        positive, negative = (nodes["CLIPTextEncode"]().encode(inputs["clip"], t)[0] for t in (row["prompt"], ""))
        empty = {"samples": torch.zeros(1, 4, 16, 16)}
        how = (int(row["seed"]), inputs["steps"], 3.0, "euler", "ddim_uniform")
        (latent,) = nodes["KSampler"]().sample(inputs["model"], *how, positive, negative, empty, 1.0)
        image = nodes["VAEDecode"]().decode(inputs["vae"], latent)[0][0]
    with Image.open(Path(folder) / "samples" / row["file"]) as opened:
        ours = torch.frombuffer(bytearray(opened.tobytes()), dtype=torch.uint8).view(64, 64, 3) / 255
    assert float((ours - image).abs().max()) < 1 / 200  # eight bits
    one_step = {"model": inputs["model"], "positive": positive, "latent": empty, "method": "one step"}
    _, score, *_ = comfy.call("VitrineNEMODetect", **one_step, negative=negative, seeds=10, timestep_index=15)
    assert float(row["nemo"]) == pytest.approx(score, abs=1e-5) and (score > 0.85) == (row["memorized"] == "yes")


@pytest.mark.nightly
def test_interrupting_stops_within_a_step_and_the_same_inputs_go_on(comfy, inputs):
    import comfy.model_management as management

    asked, seen = management.throw_exception_if_processing_interrupted, []

    def count():
        seen.append(1)
        if len(seen) == 60:
            management.interrupt_current_processing()
        asked()

    management.throw_exception_if_processing_interrupted = count
    try:
        with pytest.raises(management.InterruptProcessingException):
            comfy.call("VitrineNEMOCopyCheck", **inputs, name="stopped")
    finally:
        management.throw_exception_if_processing_interrupted = asked
    assert len(seen) == 60
    stopped, _, folder = comfy.call("VitrineNEMOCopyCheck", **inputs, name="stopped")
    _, _, whole = comfy.call("VitrineNEMOCopyCheck", **inputs, name="not-stopped")
    assert (Path(folder) / "copies.csv").read_text() == (Path(whole) / "copies.csv").read_text()


@pytest.mark.nightly
def test_the_bare_model_says_what_is_usual_and_needs_no_captions(comfy, inputs):
    patched = inputs["model"].clone()
    keys = [k for k in patched.model_state_dict() if k.endswith("attn2.to_v.weight")]
    patched.add_patches({k: (torch.zeros_like(patched.model_state_dict()[k]),) for k in keys}, 1.0)
    words = inputs | {"model": patched, "bare_model": inputs["model"], "ordinary": "", "prompts": PLANTS[0].captions[0]}
    words |= {"steps": 2}
    report, _, _ = comfy.call("VitrineNEMOCopyCheck", **words, name="bare")
    assert "0 of 1 prompts" in report  # the model without the patch gives the same pictures
    own, _, _ = comfy.call("VitrineNEMOCopyCheck", **words | {"bare_model": None}, name="none")
    assert "1 of 1 prompts" in own  # eight usual captions say what is usual


class Attends:
    """As patches of attention keep what they attend to: in lists of tables."""

    def __init__(self, tensor, weight):
        self.given, self.net, self.seen = [{"cond": tensor, "weight": weight}], torch.nn.Linear(2, 2), [object()]
        torch.nn.init.constant_(self.net.weight, weight)
        torch.nn.init.zeros_(self.net.bias)

    def __call__(self, q, k, v, extra_options):
        return q


def test_what_patches_hold_is_part_of_the_model(comfy, inputs):
    """A check went on with the pictures of another IP-Adapter image, and of other rotary positions."""
    from vitrine.engine.jobs.digests import digest
    from vitrine.nodes.comfy.contents import model_contents

    def patched(tensor, weight=1.0):
        model = inputs["model"].clone()
        model.set_model_attn2_replace(Attends(tensor, weight), "middle", 0, 0)
        return model

    a, b = torch.zeros(2), torch.ones(2)
    made = [digest(model_contents(patched(*how))) for how in ((a,), (a,), (b,), (a, 0.5))]
    assert made[0] == made[1] and len(set(made)) == 3
    flow, _, _ = comfy.call("VitrineLoadPortraits", model="flow portraits, 128 px")
    told = {
        "train_width": 128,
        "train_height": 128,
        "target_width": 192,
        "target_height": 192,
        "schedule": "none",
        "guidance_law": False,
        "guidance": 1.0,
        "override": False,
    }
    moved = [
        comfy.call("VitrineResolutionTransferLoader", model=flow, pos_embed=mode, **told)[0]
        for mode in ("rope_pi", "rope_ntk", "rope_pi")
    ]
    made = [digest(model_contents(model)) for model in moved]
    assert made[0] == made[2] != made[1]
