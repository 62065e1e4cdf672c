"""EMD nodes in real ComfyUI: against the pipeline, against stock sampling, and what they refuse."""

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.emd import FirstSteps, StudentPreset
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines.emd import EMDOneStepPipeline
from vitrine.engine.portraits import load_portraits
from vitrine_tests.lanes import nightly_but

PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"
NONE = "(the model is the student)"


@pytest.fixture(scope="module")
def loaded(comfy):
    return comfy.call("VitrineLoadPortraits")


@pytest.fixture(scope="module")
def pipe():
    return EMDOneStepPipeline.from_pipe(load_portraits().pipeline())


@pytest.fixture(scope="module")
def positive(loaded):
    with torch.inference_mode():
        return loaded[1].encode_from_tokens_scheduled(loaded[1].tokenize(PROMPT))


def generate(comfy, model, positive, batch=1, **how):
    told = {"student": NONE, "preset": "manual", "timestep": 999.0, "noise": "unit", "seed": 5} | how
    latent = {"samples": torch.zeros(batch, 4, 16, 16)}
    return comfy.call("VitrineEMDOneStepGenerator", model=model, positive=positive, latent=latent, **told)[0]


def stock(model, positive, seed, t, noise):
    """ComfyUI's own sampler: SIGMAS [sigma, 0] with euler, the noise prepared for its own scaling."""
    import comfy.sample
    import comfy.samplers

    sampling = model.get_model_object("model_sampling")
    sigma = sampling.sigmas[t].clone()
    z = comfy.sample.prepare_noise(torch.zeros(1, 4, 16, 16), seed)
    top = t == len(sampling.sigmas) - 1  # there ComfyUI multiplies by sqrt(1 + sigma^2), below by sigma
    if noise == "unit" and not top:
        z = z * torch.sqrt(1 + sigma**2) / sigma
    if noise != "unit" and top:
        z = z * sigma / torch.sqrt(1 + sigma**2)
    sigmas, euler = torch.stack([sigma, torch.zeros(())]), comfy.samplers.sampler_object("euler")
    with torch.inference_mode():
        return comfy.sample.sample_custom(
            model, z, 1.0, euler, sigmas, positive, positive, torch.zeros(1, 4, 16, 16), disable_pbar=True, seed=seed
        )


@pytest.mark.parametrize("noise", ["unit", "vp"])
@pytest.mark.parametrize("t", [999, 625, 399])
def test_node_pipeline_and_stock_graph_agree(comfy, loaded, pipe, positive, noise, t):
    found = generate(comfy, loaded[0], positive, timestep=float(t), noise=noise)
    found = loaded[0].model.process_latent_in(found["samples"])
    wanted = pipe(PROMPT, [5], StudentPreset(timestep=t, noise=noise), output_type="latent").images
    graph = loaded[0].model.process_latent_in(stock(loaded[0], positive, 5, t, noise))
    scale = wanted.abs().max()
    assert (found - graph).abs().max() / scale < 1e-5
    assert (found - wanted).abs().max() / scale < 1e-5


def test_wrong_convention_shows(comfy, loaded, positive):
    unit, vp = (generate(comfy, loaded[0], positive, timestep=399.0, noise=n)["samples"] for n in ("unit", "vp"))
    assert (unit - vp).norm() / unit.norm() > 0.1


def test_one_call_no_negative_rows(comfy, loaded, positive):
    calls = []
    network = loaded[0].model.diffusion_model
    handle = network.register_forward_hook(lambda m, i, o: calls.append(len(i[0])))
    many = generate(comfy, loaded[0], positive, batch=3)
    handle.remove()
    assert calls == [3] and many["samples"].shape == (3, 4, 16, 16)


def lora(path, metadata=None, peft=False, scale=0.05):
    site = "down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    down, up = ("lora_A.weight", "lora_B.weight") if peft else ("lora_down.weight", "lora_up.weight")
    gen = torch.Generator().manual_seed(0)
    tensors = {
        f"lora_unet_{site}.{down}": torch.randn(2, 32, generator=gen) * scale,
        f"lora_unet_{site}.{up}": torch.randn(32, 2, generator=gen),
    }
    save_file(tensors if peft else tensors | {f"lora_unet_{site}.alpha": torch.tensor(2.0)}, path, metadata)


@pytest.fixture
def folder(tmp_path):
    import folder_paths

    before = folder_paths.folder_names_and_paths["loras"]
    folder_paths.folder_names_and_paths["loras"] = ([str(tmp_path)], before[1])
    yield tmp_path
    folder_paths.folder_names_and_paths["loras"] = before


def test_student_file_and_refusals(comfy, loaded, positive, folder):
    lora(folder / "good.safetensors", StudentPreset(timestep=625).to_metadata(), scale=0.5)
    lora(folder / "bare.safetensors")
    lora(folder / "peft.safetensors", StudentPreset().to_metadata(), peft=True)
    strange = {f"lora_unet_other.lora_{part}.weight": torch.ones(2, 2) for part in ("down", "up")}
    save_file(strange, folder / "other.safetensors", StudentPreset().to_metadata())
    base = generate(comfy, loaded[0], positive, timestep=625.0)["samples"]
    student = generate(comfy, loaded[0], positive, student="good.safetensors", preset="auto")["samples"]
    assert (student - base).abs().max() > 1e-4
    again = generate(comfy, loaded[0], positive, timestep=625.0)["samples"]
    assert torch.equal(again, base), "the LoRA stays on its clone"
    for name, message in (("bare", "student preset"), ("peft", "PEFT"), ("other", "LoRA of this base")):
        with pytest.raises(VitrineError, match=message):
            generate(comfy, loaded[0], positive, student=f"{name}.safetensors", preset="auto")
    with pytest.raises(VitrineError, match="auto without"):
        generate(comfy, loaded[0], positive, preset="auto")


def in_every_list(comfy, name, file):
    """Load LoRA lists the student, and our generator knows its preset."""
    import folder_paths
    from vitrine.nodes.comfy.lora import preset_in

    with_own = comfy.nodes.NODE_CLASS_MAPPINGS["LoraLoaderModelOnly"].INPUT_TYPES()["required"]["lora_name"][0]
    assert f"vitrine/{name}.safetensors" in with_own
    assert folder_paths.get_full_path("loras", f"vitrine/{name}.safetensors") == file
    assert preset_in(f"vitrine/{name}.safetensors").timestep == 625.0


def test_distil_in_inference_mode_then_use_the_file(comfy, loaded, positive, folder):
    import shutil

    told = {"base": "portraits", "prompts": "a smiling face\na pale face", "name": "tiny", "steps": 2, "batch": 2}
    told |= {"rank": 2, "K": 2, "guidance": 2.0, "timestep": 625.0, "diff_instruct": False, "seed": 0}
    pictures, file = comfy.call("VitrineEMDDistill", **told)
    assert pictures.shape == (4, 64, 64, 3) and pictures.min() >= 0 and pictures.max() <= 1
    in_every_list(comfy, "tiny", file)
    shutil.copy(file, folder / "tiny.safetensors")
    base = generate(comfy, loaded[0], positive, timestep=625.0)["samples"]
    student = generate(comfy, loaded[0], positive, student="tiny.safetensors", preset="auto")["samples"]
    assert not torch.equal(student, base)
    other = EMDOneStepPipeline.from_pipe(load_portraits().pipeline())
    wanted = other(PROMPT, [5], other.load_student(file, "portraits"), output_type="latent").images
    found = loaded[0].model.process_latent_in(student)
    assert (found - wanted).abs().max() / wanted.abs().max() < 1e-5, "both doors, one student file"
    with pytest.raises(VitrineError, match="letters without folders"):
        comfy.call("VitrineEMDDistill", **told | {"name": "../x"})


@pytest.fixture
def portrait_students(monkeypatch):
    """Published students' settings, as if they had been distilled from the portraits model."""
    from dataclasses import replace

    from vitrine.nodes import emd as nodes

    monkeypatch.setattr(nodes, "_SEVERAL", {k: replace(s, base="") for k, s in nodes._SEVERAL.items()})
    return nodes._SEVERAL


SEVERAL = ["SDXL-Lightning, 4 steps", "DMD2 SDXL, 4 steps", "TCD-LoRA, 4 steps"]


@pytest.mark.parametrize("name", nightly_but(SEVERAL, SEVERAL[:1]))
def test_students_of_several_steps_node_pipeline_and_variety(comfy, loaded, pipe, positive, portrait_students, name):
    calls = []
    handle = loaded[0].model.diffusion_model.register_forward_hook(lambda m, i, o: calls.append(len(i[0])))
    found = generate(comfy, loaded[0], positive, batch=2, preset=name)
    mixed = generate(comfy, loaded[0], positive, batch=2, preset=name, base=loaded[0], base_steps=3)
    half = generate(comfy, loaded[0], positive, batch=2, preset=name, base=loaded[0], replaces=2)
    handle.remove()
    assert calls == [2] * 4 + [2] * 6 + [2] * 4, "one call a step; three of the base for the first; two for two"
    teacher = Denoiser.from_diffusers(pipe)
    three, two = ({"base": teacher, "first": first} for first in (FirstSteps(steps=3), FirstSteps(2)))
    for ours, how in ((found, {}), (mixed, three), (half, two)):
        wanted = pipe.few_steps(PROMPT, [5, 6], portrait_students[name], output_type="latent", **how).images
        ours = loaded[0].model.process_latent_in(ours["samples"])
        assert (ours - wanted).abs().max() / wanted.abs().max() < 1e-4


def test_a_student_that_predicts_the_picture(comfy, loaded, positive, monkeypatch):
    from vitrine.nodes import emd as nodes

    preset = StudentPreset(timestep=999.0, prediction="x0", noise="vp")
    monkeypatch.setitem(nodes.ONE_STEP, "SDXL-Lightning, 1 step", preset)
    outputs = []
    handle = loaded[0].model.diffusion_model.register_forward_hook(lambda m, i, o: outputs.append(o.clone()))
    found = generate(comfy, loaded[0], positive, preset="SDXL-Lightning, 1 step")
    handle.remove()
    torch.testing.assert_close(loaded[0].model.process_latent_in(found["samples"]), outputs[0].float())


def test_students_of_other_models_are_refused(comfy, loaded, positive):
    for how, message in (
        ({"preset": "SDXL-Lightning, 4 steps"}, "a UNet of SDXL"),
        ({"preset": "LCM (full), 4 steps"}, "a UNet of SD1.5 or SDXL"),
        ({"preset": "DMD2 SD1.5"}, "accepted: a UNet of SD1.5"),
        ({"base": loaded[0]}, "disconnect it"),
    ):
        with pytest.raises(VitrineError, match=message):
            generate(comfy, loaded[0], positive, **how)
