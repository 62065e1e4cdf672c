"""The LoRA report on the portraits model: sections, resuming, budgets, broken files; the pipeline left as it was."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vitrine.cli.main import main
from vitrine.engine.copies import Material, Pictures, ReportConfig, lora_report
from vitrine.engine.copies.lora_findings import CopyReader, between
from vitrine.engine.copies.lora_samples import AskedPrompt
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.lora_writing import write_lora
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines import PipelineModel
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import PEOPLE_LORAS
from vitrine.engine.runtime.progress import Interrupted
from vitrine.engine.w2w import read_lora
from vitrine.engine.w2w.train.lora_trainer import BatchedTrainer, Subject
from vitrine.evidence.nemo.copy_claims import RECIPE
from vitrine.evidence.portraits.identities import FIRST_IDENTITY, training_pictures

FILE = PEOPLE_LORAS / "person-0003.safetensors"
CONFIG = ReportConfig(seeds=2, steps=2, prompts=1, strengths=(0.5,))
IMAGES, CAPTIONS, _ = training_pictures(FIRST_IDENTITY + 3, 3)
MATERIAL = Material(
    Pictures(["a", "b", "c"], IMAGES.__getitem__, IMAGES),
    tuple(CAPTIONS),
    ("zorbal",),
    ("a smiling face", "a dark face with long blond hair on pink"),
)


@pytest.fixture(scope="module")
def holder():
    pipe = load_portraits().pipeline()
    pipe.set_progress_bar_config(disable=True)
    return PipelineModel(pipe)


@pytest.fixture(scope="module")
def report(holder, tmp_path_factory):
    return lora_report([FILE], tmp_path_factory.mktemp("report"), lambda: holder, MATERIAL, CONFIG)


def test_every_section_is_measured_and_written(report, holder):
    (found,) = report.loras
    assert found.facts.file is not None and found.loadings[0].loaded == found.loadings[0].layers == 28
    kinds = [p.kind for p in found.copies]
    assert kinds == ["caption", "trigger alone", "ordinary", "ordinary"]
    assert all(0 <= p.copies <= 2 and p.nearest in range(3) and 0 < p.ratio < 2 for p in found.copies)
    assert set(found.strengths) == {0.5, 1.0} and set(found.strengths[1.0]) == {"distance", "lost", "copies"}
    assert all(len(row) == 5 and min(row) > 0 for row in found.changes.values()) and len(found.changes) == 4
    assert 0 < found.cost.drift < 2 and found.cost.variety[0] > 0
    verdicts = {s.topic: s.verdict for s in found.summary}
    assert len(verdicts) == 5 and set(verdicts.values()) <= {"fine", "look", "bad", "not measured"}
    assert verdicts["what it is"] == "fine" and verdicts["its neighbours"] == "not measured"
    table = json.loads((report.folder / "report.json").read_text())
    assert table["loras"][0]["what_it_copies"]["prompts"][0]["nearest"] in "abc" and table["spent"]["network_rows"] > 0
    page = report.page.read_text()
    assert page.count("data:image/png;base64,") == 6 and "http" not in page and "Thresholds:" in page
    assert "what it copies [" in report.text() and not holder.pipe.get_active_adapters()
    assert not any(name.endswith("lora_A") for name, _ in holder.backbone.named_modules())


def test_equal_samples_have_no_distance_and_a_prompt_loses_what_the_lora_takes(tmp_path):
    g = torch.Generator().manual_seed(0)
    pictures = torch.nn.functional.interpolate(torch.rand(6, 3, 8, 8, generator=g), (64, 64), mode="bilinear")
    same = pictures[:1].expand(4, -1, -1, -1) + 0.01 * torch.randn(4, 3, 64, 64, generator=g)
    with CopyReader({"a": pictures}, ["a"], Pictures(), tmp_path) as reader:
        one, other = (reader.of_prompt(AskedPrompt("a", "caption"), full) for full in (same, pictures[:4]))
    assert between(same) == pytest.approx(0.01 * 2**0.5, rel=0.05) and one.distance == between(same)
    assert one.lost > 0.9 > 0.1 > abs(other.lost) and (one.repeats, other.repeats) == (4, 0)


def test_the_same_call_samples_nothing_and_another_model_is_refused(report, holder):
    again = lora_report([FILE], report.folder, lambda: holder, MATERIAL, CONFIG)
    assert sum(report.budget.rows_of.values()) == report.budget.rows > 0
    assert again.budget.rows == 0 and again.loras[0].to_dict() == report.loras[0].to_dict()
    with pytest.raises(VitrineError, match="begun with"):
        lora_report([FILE], report.folder, lambda: holder, MATERIAL, ReportConfig(seeds=3, steps=2, prompts=1))


def test_a_pipeline_in_place_of_files_is_refused(holder, tmp_path):
    with pytest.raises(VitrineError, match=r"given StableDiffusionPipeline; .*PipelineModel\(pipe\)"):
        lora_report(holder.pipe, tmp_path)


def test_interrupted_and_out_of_budget_reports_go_on(report, holder, tmp_path):
    seen = []

    def stop(step, total, preview=None):
        seen.append(step)
        if len(seen) == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        lora_report([FILE], tmp_path, lambda: holder, MATERIAL, CONFIG, progress=stop)
    assert not holder.pipe.get_active_adapters() and (tmp_path / "report.html").is_file()
    short = lora_report([FILE], tmp_path, lambda: holder, MATERIAL, CONFIG, minutes=1e-9)
    assert short.budget.rows == 0 and short.loras[0].skipped and "left out for the budget" in short.text()
    whole = lora_report([FILE], tmp_path, lambda: holder, MATERIAL, CONFIG)
    assert whole.loras[0].to_dict() == report.loras[0].to_dict()


def test_without_a_model_and_with_broken_files(tmp_path, capsys):
    nan = tmp_path / "nan.safetensors"
    tensors = load_file(FILE)
    next(v for k, v in tensors.items() if "lora_up" in k)[0, 0] = torch.nan
    save_file(tensors, nan)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(FILE.read_bytes()[:-40])
    twin = write_lora(tmp_path / "twin.safetensors", read_lora(FILE), "diffusers")
    assert main(["lora", "report", str(FILE), str(nan), str(cut), str(twin), "--out", str(tmp_path / "out")]) == 2
    loras = json.loads((tmp_path / "out" / "report.json").read_text())["loras"]
    verdicts = {x["name"]: [s["verdict"] for s in x["summary"]] for x in loras}
    assert verdicts["nan"][0] == verdicts["cut"][0] == "bad" and verdicts["person-0003"][0] == "fine"
    assert verdicts["twin"][4] == verdicts["person-0003"][4] == "look"
    assert "NaN or infinity" in capsys.readouterr().out and "cut" in (tmp_path / "out" / "report.html").read_text()
    assert main(["lora", "report", str(tmp_path / "none.safetensors"), "--out", str(tmp_path / "x")]) == 2
    assert main(["lora", "report", str(tmp_path / "a.pt"), "--out", str(tmp_path / "x")]) == 2


def test_exit_statuses_are_those_of_linters_and_a_folder_is_its_files(tmp_path, capsys):
    folder, out = tmp_path / "loras", ["--out", str(tmp_path / "out")]
    (folder / "deep").mkdir(parents=True)
    write_lora(folder / "a.safetensors", read_lora(FILE))
    write_lora(folder / "deep" / "b.safetensors", read_lora(FILE))
    assert main(["lora", "report", str(folder), *out]) == 0
    said = capsys.readouterr().out
    assert "a: look: 2 of 5 measured" in said and "b: look: 2 of 5 measured" in said
    assert json.loads((tmp_path / "out" / "report.json").read_text())["schema"] == 1
    assert main(["lora", "report", str(folder), "--fail-on", "look", *out]) == 1
    tensors = load_file(FILE)
    next(v for k, v in tensors.items() if "lora_up" in k)[0, 0] = torch.nan
    save_file(tensors, folder / "nan.safetensors")
    assert main(["lora", "report", str(folder), *out]) == 1
    assert main(["lora", "report", str(folder), "--fail-on", "never", *out]) == 0
    (folder / "cut.safetensors").write_bytes(FILE.read_bytes()[:-40])
    assert main(["lora", "report", str(folder), "--fail-on", "never", *out]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["lora", "report", str(tmp_path / "empty"), *out]) == 2


def test_what_diffusers_does_not_load_is_converted_and_another_models_lora_is_refused_by_name(holder, tmp_path):
    """The published weights2weights spelling, which loads as nothing; and layers of another width."""
    lora = read_lora(FILE)
    tensors = {}
    for path, layer in lora.items():
        stem = f"base_model.model.{path}"
        tensors[f"{stem}.lora_A.identity1.weight"] = layer.down
        tensors[f"{stem}.lora_B.identity1.weight"] = layer.up * layer.scale
    strange = tmp_path / "strange.safetensors"
    save_file(tensors, strange)
    wide = {k: torch.cat([v, v], 1) if "lora_A" in k else v for k, v in tensors.items()}
    save_file(wide, tmp_path / "wide.safetensors")
    few = ReportConfig(seeds=2, steps=1, prompts=1, strengths=())
    files, material = [strange, tmp_path / "wide.safetensors", FILE], replace(MATERIAL, ordinary=MATERIAL.ordinary[:1])
    first, second, third = lora_report(files, tmp_path / "out", lambda: holder, material, few).loras
    assert [p.bare for p in third.copies] == [p.bare for p in first.copies], "both are compared with the same samples"
    assert third.loadings[0].note == ""
    assert "does not load" in first.loadings[0].note and first.loadings[0].loaded == 28 and first.copies
    assert first.summary[0].verdict == "look" and first.kind_mean(("caption",))[0] > 0.01
    assert second.summary[0].verdict == "bad" and "cannot be put on this model" in second.summary[0].text
    assert len(second.summary[0].text) < 500
    assert not holder.pipe.get_active_adapters()


@pytest.mark.nightly  # two minutes: a LoRA is trained, and ten checkpoints of it are sampled
def test_a_run_that_memorizes_says_which_checkpoint_copies_first(holder, tmp_path):
    images, captions, _ = training_pictures(FIRST_IDENTITY + 300, 2)
    portraits = load_portraits()
    for module in (portraits.unet, portraits.text_encoder, portraits.vae):
        module.requires_grad_(False)
    latents = portraits.vae.encode(images * 2 - 1).latent_dist.mean * portraits.vae.config.scaling_factor
    subject = Subject("two portraits", latents, Condition(portraits.encode(captions).detach()), 0)
    trainer, files = BatchedTrainer(Denoiser.from_diffusers(portraits.pipeline()), [subject], RECIPE), []
    for step in range(1, RECIPE.steps + 1):
        trainer.step()
        if step % 30 == 0:
            files.append(write_lora(tmp_path / "loras" / f"memo-step{step}.safetensors", trainer.loras()[0]))
    config = ReportConfig(strengths=(), prompts=2)
    pictures = Pictures(["a", "b"], images.__getitem__, images)
    material = Material(pictures, tuple(captions), ordinary=MATERIAL.ordinary)
    report = lora_report(files, tmp_path / "out", lambda: holder, material, config)
    (run,) = report.runs
    first = run.first_copy
    assert len(run.checkpoints) == 10 and first is not None and 3 <= first <= 8
    assert run.headline == f"Copies from step {30 * (first + 1)} on" and run.suggested == first - 1
    agreement = [row.agreement for row in run.copies]
    assert agreement == sorted(agreement) and run.headline in report.page.read_text()
