"""The one-step student that ships with the portraits model."""

import pytest
import torch
from vitrine.engine.emd import read_student
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines.emd import one_step_pipeline
from vitrine.engine.portraits import caption, sample_scenes
from vitrine.engine.portraits.shipped import STUDENTS, student_file
from vitrine.evidence.portraits.classifier import attribute_accuracy, load_classifier, read


def test_files_carry_their_preset_and_stay_small():
    for name in STUDENTS:
        preset, tensors = read_student(student_file(name))
        assert preset.timestep == 999 and preset.noise == "unit" and tuple(preset.shape) == (4, 16, 16)
        assert student_file(name).stat().st_size < 3 * 2**20 and all(
            t.dtype == torch.float16 or t.ndim == 0 for t in tensors.values()
        )
    with pytest.raises(VitrineError, match="diff-instruct"):
        student_file("other")


def test_one_step_shows_what_the_prompt_says():
    scenes = sample_scenes(range(5_600_000, 5_600_032))
    pipe, preset = one_step_pipeline()
    calls = []
    handle = pipe.unet.register_forward_hook(lambda *a: calls.append(1))
    images = pipe(caption(scenes), list(range(32)), preset, output_type="pt").images
    handle.remove()
    found = attribute_accuracy(read(load_classifier(), images.float()), scenes)
    assert len(calls) == 1 and sum(found.values()) / len(found) > 0.9
