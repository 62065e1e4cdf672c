"""Edits as LoRAs of their own, for strengths -1 .. 1 in any tool."""

import pytest
import torch
from vitrine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import W2WPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import (
    DeltaSpace,
    W2WModel,
    difference,
    edit,
    load_space,
    materialise,
    read_lora,
    sample,
    slider_lora,
    write_lora,
)
from vitrine_tests.engine.small_loras import deltas, same

pytestmark = pytest.mark.rounding


@pytest.fixture
def delta(loras):
    return DeltaSpace.of(loras(8), [f"m{i}" for i in range(8)])


def change(space, before, after):
    return deltas(difference(materialise(space, after), materialise(space, before)))


def test_a_delta_spaces_slider_is_the_edit_for_every_model(delta):
    rows = delta.coefficients
    slider = slider_lora(delta, rows[0], rows[1])
    assert max(slider.missed) < 1e-5
    for start in (torch.zeros(delta.dimension), rows[2], rows[3]):
        for strength in (-1.0, 0.5, 1.0):
            wanted = change(delta, start, start + strength * (rows[1] - rows[0]))
            assert same({p: strength * d for p, d in deltas(slider.lora).items()}, wanted, 1e-5)
    low = slider_lora(delta, rows[0], rows[1], rank=1)
    assert {layer.rank for layer in low.lora.values()} == {1} and 0.01 < max(low.missed) < 1


@pytest.mark.parametrize("one_sided", [False, True])
def test_what_a_slider_misses_in_factors_mode(space, one_sided):
    before, after = space.coefficients[0].float(), space.coefficients[1].float()
    slider = slider_lora(space, before, after, one_sided=one_sided)
    for sign, missed in zip((-1.0, 1.0), slider.missed, strict=True):
        wanted = change(space, before, before + sign * (after - before))
        off = sum(float((sign * d - wanted[p]).square().sum()) for p, d in deltas(slider.lora).items())
        assert missed == pytest.approx(off / sum(float(d.square().sum()) for d in wanted.values()), abs=1e-4)
    assert (slider.missed[1] < 1e-6) == one_sided
    # s (dB A + B dA): what is missed is s^2 dB dA, the same at both ends
    small = slider_lora(space, before, before + 0.01 * (after - before))
    assert max(small.missed) < 1e-2 * max(slider_lora(space, before, after).missed)


@pytest.fixture(scope="module")
def person():
    space = load_space(PEOPLE_SPACE)
    return space, sample(space, [4])[0]


def picture(pipe):
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(3)
    return pipe(
        "a smiling face with cap left navy shirt on blue",
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=noise,
        output_type="latent",
    ).images


@pytest.mark.parametrize("one_sided", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_diffusers_draws_the_edit(person, tmp_path, one_sided):
    """The person's LoRA and the slider's, loaded by diffusers, against the pipeline's edit, relative to the edit."""
    space, row = person
    after = edit(space, row, {"beard": 1.0})
    slider = slider_lora(space, row, after, one_sided=one_sided)
    pipe = load_portraits().pipeline()
    pipe.load_lora_weights(str(write_lora(tmp_path / "person.safetensors", materialise(space, row))), adapter_name="p")
    pipe.load_lora_weights(str(write_lora(tmp_path / "beard.safetensors", slider.lora)), adapter_name="s")
    ours = W2WPipeline.from_pipe(load_portraits().pipeline())
    ours.set_progress_bar_config(disable=True)

    def wanted(coefficients):
        model = W2WModel(coefficients[None], space.identity)
        return ours(
            "a smiling face with cap left navy shirt on blue",
            space=space,
            model=model,
            seeds=[3],
            num_inference_steps=4,
            guidance_scale=1.0,
            output_type="latent",
        ).images

    bare = wanted(row)
    pipe.set_adapters(["p", "s"], [1.0, 0.0])
    assert (picture(pipe) - bare).abs().max() < 1e-3
    for strength in (-1.0, 1.0):
        pipe.set_adapters(["p", "s"], [1.0, strength])
        edited = wanted(row + strength * (after - row))
        missed = (picture(pipe) - edited).norm() / (edited - bare).norm()
        assert missed < (1e-3 if one_sided and strength > 0 else 0.4), (strength, missed)


def test_the_commands(tmp_path, capsys):
    space = load_space(PEOPLE_SPACE)
    out = tmp_path / "s.safetensors"
    options = [
        "--edits",
        "beard=1",
        "--around",
        space.names[3],
        "--rank",
        "1",
        "--save-dtype",
        "float16",
        "--out",
        str(out),
    ]
    assert main(["w2w", "slider", str(PEOPLE_SPACE), *options]) == 0
    text = capsys.readouterr().out
    assert "slider of rank 1; misses" in text
    row = space.coefficients[3].float()
    wanted = slider_lora(space, row, edit(space, row, {"beard": 1.0}), 1)
    assert same(deltas(read_lora(out)), deltas(wanted.lora), 1e-2) and f"{wanted.missed[1]:.2%}" in text
    assert main(["w2w", "slider", str(PEOPLE_SPACE)]) == 2


def test_refusals(space):
    row = space.coefficients[0].float()
    with pytest.raises(VitrineError, match="changes nothing"):
        slider_lora(space, row, row)
    with pytest.raises(VitrineError, match="rank"):
        slider_lora(space, row, 2 * row, rank=0)
