"""What EMD does with each family: trains it, draws with it, and exports what diffusers and ComfyUI load.

Each cell of the table in docs/emd_families.md is a test here. ``VITRINE_WRITE_DOCS=1 pytest`` of this file writes it.
"""

import copy
import os
from pathlib import Path

import pytest
import torch
from vitrine.engine.emd import EStepConfig, StudentPreset, one_step, read_student
from vitrine.engine.emd.emd_trainer import Trainer
from vitrine.engine.emd.networks import GENERATOR, SCORE, Roles
from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import EMDOneStepPipeline
from vitrine_tests.comfy.emd_families import TWINS, teacher
from vitrine_tests.pipelines.encoded import source

pytestmark = pytest.mark.nightly

FAMILIES = ["SD1 (portraits)", "SD2, predicting v", "SDXL", "Flux (flow portraits)", *TWINS]
COLUMNS = ("train", "run", "export", "load in diffusers", "Load LoRA of ComfyUI", "EMD's nodes in ComfyUI")
PAGE = Path(__file__).parents[2] / "docs" / "emd_families.md"
DRAWN = {"SD1 (portraits)": "sd", "SDXL": "sdxl", "Flux (flow portraits)": "flux"} | {
    family: drawn for family, (*_, drawn) in TWINS.items()
}
CORE_KNOWS_NOT = ("Lumina 2", "Wan")
"""Families whose diffusers names core's loader does not know."""
UNTESTED = {"SD3, SD3.5 medium": "core takes SD3's width for 64 times its depth, which the tiny one's is not"}
LIMIT = 1e-4
rows = {}


@pytest.fixture(scope="module")
def folder(comfy, tmp_path_factory):
    import folder_paths

    made, before = tmp_path_factory.mktemp("students"), folder_paths.folder_names_and_paths["loras"]
    folder_paths.folder_names_and_paths["loras"] = ([str(made)], before[1])
    yield made
    folder_paths.folder_names_and_paths["loras"] = before


class Student:
    """A short run of a family's teacher, its files, and what the student draws."""

    def __init__(self, family, teacher, folder):
        self.family, self.teacher, self.folder = family, teacher, folder / family.replace(" ", "_")
        before = {name: value.clone() for name, value in teacher.net.state_dict().items()}
        config = EMDTrainConfig(
            2,
            1,
            rank=3,
            chain=EStepConfig(1, gz=0.01),
            lr_generator=0.02,
            lr_score=0.02,
            advanced=EMDAdvancedConfig(auto_gz=False, ema=0.0),
        )
        with teacher.epsilon(teacher.net):
            self.run = Trainer(teacher.denoiser, teacher.cond, teacher.shape, config, self.folder)
            start = {role: self._weights(role) for role in (GENERATOR, SCORE)}
            self.files = self.run.run()
            self.moved = {role: self._weights(role) for role in start}
            self.start = start
            self.z = torch.randn(1, *teacher.shape, generator=torch.Generator().manual_seed(5))
            self.plain = self.drawn(self.run.roles.teacher)
            with self.run.roles.with_weights(GENERATOR, _halved(self.run.average.values)):
                self.wanted = self.drawn(self.run.roles.generator)
        self.run.roles.remove()
        after = teacher.net.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items()), "the teacher has changed"

    def _weights(self, role):
        return {name: value.detach().clone() for name, value in self.run.roles.parameters(role).items()}

    def drawn(self, denoiser):
        with torch.no_grad():
            return one_step(denoiser, self.z, self.teacher.cond, self.run.preset)

    def same(self, ours):
        """Whether it is what the student draws, and no longer the teacher."""
        scale = self.wanted.abs().max()
        assert (self.plain - self.wanted).abs().max() > 1e-3 * scale
        assert (ours.reshape(self.wanted.shape) - self.wanted).abs().max() < LIMIT * scale


def _halved(weights):
    return {name: value.half().float() for name, value in weights.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def student(request, comfy, folder):
    rows[request.param] = dict.fromkeys(COLUMNS, "–")
    return Student(request.param, teacher(comfy, request.param), folder)


def note(student, column, cell="✓"):
    rows[student.family][column] = cell


def layers_of(tensors):
    return {name.rsplit(".lora_", 1)[0] for name in tensors if ".lora_" in name}


def test_both_networks_train_and_the_teacher_stays(student):
    for role in (GENERATOR, SCORE):
        start, end = student.start[role], student.moved[role]
        assert any(".lora_B." in name and not torch.equal(value, start[name]) for name, value in end.items())
        assert all(value.isfinite().all() for value in end.values())
    flow = student.teacher.denoiser.prediction == "flow"
    assert student.run.preset.timestep == (1000.0 if flow else 999.0)
    note(student, "train")


def test_its_own_pipeline_draws(student):
    if student.family == "SD2, predicting v":
        pipe, told = student.teacher.pipeline(student.teacher.net), {}
        drawn = one_step(student.teacher.denoiser, student.z, student.teacher.cond, StudentPreset())
        assert pipe.unet is student.teacher.net and drawn.isfinite().all()
    else:
        from vitrine_tests.machine.stock import stock

        name = DRAWN[student.family]
        pipe, told = (stock(name), {}) if name in ("sd", "sdxl") else source(name)
        how = {k: v for k, v in told.items() if k.startswith("prompt_") or k in ("height", "width")}
        made = EMDOneStepPipeline.from_pipe(pipe)
        latents = made(None if "prompt_embeds" in how else "a face", [1], output_type="latent", **how).images
        assert latents.isfinite().all()
    note(student, "run")


def test_files_carry_the_preset_and_names_that_are_read(student):
    part = "unet" if "SD1" in student.family or "SD2" in student.family or "SDXL" in student.family else "transformer"
    names = ["generator_kohya", "generator_diffusers"] if part == "unet" else ["generator_diffusers"]
    assert [file.stem for file in student.files] == names
    for file in student.files:
        preset, tensors = read_student(file, any_names=True)
        assert preset == student.run.preset
        begins = "lora_unet_" if file.stem.endswith("kohya") else f"{part}."
        assert all(name.startswith(begins) for name in tensors)
        assert 2 * len(layers_of(tensors)) == len(student.run.average.values)
    note(student, "export", f"{len(layers_of(tensors))} layers")


def test_diffusers_loads_every_layer(student):
    for file in student.files:
        net = copy.deepcopy(student.teacher.net)
        pipe = student.teacher.pipeline(net)
        pipe.load_lora_weights(str(file))
        loaded = [name for name, _ in net.named_parameters() if ".lora_B." in name]
        assert 2 * len(loaded) == len(student.run.average.values)
        from vitrine.engine.diffusion.denoiser import Denoiser

        with student.teacher.epsilon(net):
            student.same(student.drawn(Denoiser.from_diffusers(net, student.teacher.scheduler)))
    note(student, "load in diffusers", f"✓ `{type(pipe).__name__}`")


def in_comfyui(student, model):
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    z = student.z.reshape(1, *student.teacher.latents)
    with torch.inference_mode():
        cond = condition_of(model, student.teacher.prompt, z)
        return one_step(denoiser_of(model), z, cond, student.run.preset)


def test_comfyuis_load_lora(student):
    if student.family in UNTESTED:
        note(student, "Load LoRA of ComfyUI", "not tested (1)")
        pytest.skip(UNTESTED[student.family])
    import comfy.lora
    import comfy.lora_convert
    import comfy.sd
    import comfy.utils

    tensors = comfy.utils.load_torch_file(str(student.files[0]), safe_load=True)
    keys = comfy.lora.model_lora_keys_unet(student.teacher.model.model, {})
    known = comfy.lora.load_lora(comfy.lora_convert.convert_lora(dict(tensors)), keys)
    count, total = len(known), len(layers_of(tensors))
    note(student, "Load LoRA of ComfyUI", "✓" if count == total else f"{count} of {total} layers")
    assert (count == total) == (student.family not in CORE_KNOWS_NOT)
    if count == total:
        model, _ = comfy.sd.load_lora_for_models(student.teacher.model, None, dict(tensors), 1.0, 0.0)
        student.same(in_comfyui(student, model))


def test_emds_nodes_in_comfyui(student, folder):
    from vitrine.nodes.comfy.lora import preset_in, with_student

    name = str(student.files[0].relative_to(folder))
    assert preset_in(name) == student.run.preset
    student.same(in_comfyui(student, with_student(student.teacher.model, name)))
    note(student, "EMD's nodes in ComfyUI")


def test_pixart_is_refused():
    from diffusers import DDIMScheduler
    from vitrine.engine.diffusion.denoiser import Denoiser
    from vitrine_tests import models

    with pytest.raises(VitrineError, match="which diffusers has no adapters for"):
        Roles(Denoiser.from_diffusers(models.pixart(), DDIMScheduler()), 2)
    pipe, told = source("pixart")
    how = {"height": told["height"], "width": told["width"], "output_type": "latent"}
    assert EMDOneStepPipeline.from_pipe(pipe)("a face", [1], **how).images.isfinite().all()
    refused = "refused: diffusers has no adapters for it"
    rows["PixArt"] = dict.fromkeys(COLUMNS, "–") | {"train": refused, "run": "✓"}


def test_the_page_has_the_table():
    if set(rows) != {*FAMILIES, "PixArt"} or any(row["train"] == "–" for row in rows.values()):
        pytest.skip("not every family was tested and trained: the nightly cases were left out")
    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {family} | {' | '.join(row.values())} |" for family, row in rows.items()]
    before, _, behind = PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")
    written, _, after = behind.partition("<!-- end of table -->\n")
    table = "\n".join(lines) + "\n"
    if os.environ.get("VITRINE_WRITE_DOCS"):
        PAGE.write_text(f"{before}<!-- table -->\n{table}<!-- end of table -->\n{after}", encoding="utf-8")
        written = table
    assert written == table, "VITRINE_WRITE_DOCS=1 pytest tests/comfy/test_emd_families.py"
