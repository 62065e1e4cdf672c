"""A folder gives the pipeline that ``from_pipe`` gives for the model in it, to users and to commands alike."""

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from vitrine.cli.main import main
from vitrine.engine import pipelines
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import Calibration
from vitrine.engine.pipelines.loading import LoadConfig, formed, load_pipeline
from vitrine.engine.pipelines.nemo_prompts import predicted_pixels
from vitrine_tests.lanes import nightly_but
from vitrine_tests.machine.stock import modules, stock

KINDS = [
    pipelines.ActivationTapPipeline,
    pipelines.CorrespondencePipeline,
    pipelines.EMDOneStepPipeline,
    pipelines.NEMOPipeline,
    pipelines.SegmentationPipeline,
    pipelines.W2WPipeline,
]
DAILY = [pipelines.ActivationTapPipeline, pipelines.EMDOneStepPipeline, pipelines.NEMOPipeline]


@pytest.fixture(scope="module", params=["sdxl", "flux"])
def saved(request, tmp_path_factory):
    """(stock pipeline, its folder)."""
    folder, pipe = tmp_path_factory.mktemp(request.param), stock(request.param)
    pipe.save_pretrained(folder)
    return pipe, str(folder)


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdxl")
    stock("sdxl").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def held():
    """What a single file held."""
    return stock("sdxl")


@pytest.mark.parametrize("kind", nightly_but(KINDS, DAILY))
def test_a_folder_gives_the_form_of_its_model(kind, saved):
    """SDXL's second text encoder was left out without a word, and transformers ended in errors of diffusers."""
    pipe, folder = saved
    wanted = type(kind.from_pipe(pipe))
    for made in (
        kind.from_pretrained(folder, torch_dtype=torch.float16),
        load_pipeline(folder, kind, LoadConfig(device="cpu", dtype="float16")),
    ):
        assert type(made) is wanted
        assert modules(made).keys() == modules(pipe).keys()
        assert {part.dtype for part in modules(made).values()} == {torch.float16}


def test_a_size_to_score_at_is_kept(sdxl):
    assert predicted_pixels(pipelines.NEMOPipeline.from_pretrained(sdxl, size=(48, 64))) == (48, 64)


def test_a_folder_of_another_family_is_refused(sdxl):
    with pytest.raises(VitrineError, match="StableDiffusionXLPipeline"):
        load_pipeline(sdxl, StableDiffusionPipeline, LoadConfig(device="cpu"))
    with pytest.raises(VitrineError, match="is for another model family"):
        pipelines.ControlConditionedPipeline.from_pipe(stock("flux"))


def test_prompts_are_calibrated_on_sdxl(sdxl, tmp_path, capsys):
    captions = tmp_path / "captions.txt"
    captions.write_text("a cat\na horse\na photo of a hat\n", encoding="utf-8")
    out = tmp_path / "calibration.safetensors"
    assert main(["nemo", "calibrate", str(captions), "--model", sdxl, "--out", str(out), "--device", "cpu"]) == 0
    assert Calibration.load(out).score.count == 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_single_file_held_takes_the_form_of_its_model(kind, held):
    """A file of SDXL was refused by the letters XL in a class's name."""
    assert type(formed(held, kind)) is type(kind.from_pipe(held))


def test_a_stock_class_takes_its_own_alone(held):
    assert formed(held, StableDiffusionXLPipeline) is held and formed(held, None) is held
    with pytest.raises(VitrineError, match="given StableDiffusionXLPipeline; accepted: StableDiffusionPipeline"):
        formed(held, StableDiffusionPipeline)
