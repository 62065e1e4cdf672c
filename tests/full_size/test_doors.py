"""One file, one prompt, one seed: the same numbers from ComfyUI and from diffusers, which read it by other code."""

import pytest
from vitrine_tests.full_size.conftest import families
from vitrine_tests.full_size.scene import PROMPT, SELECTION


def away(found, wanted):
    """Relative, in the Euclidean norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("family", families())
def test_taps_are_equal(family, scene, loaded):
    in_comfy = scene(family).taps[0]
    theirs = {a: in_comfy[a].tensor.clone() for a in in_comfy}
    pipe = loaded(family)
    of_tap = {"preset": SELECTION[family], "timestep": 50, "seeds": [0], "output_type": "none"}
    ours = pipe.of("ActivationTap").tap(pipe.images[:2], PROMPT, **of_tap).activations
    assert set(theirs) == set(ours)
    errors = {a: away(ours[a].tensor, theirs[a]) for a in theirs}
    assert max(errors.values()) < 1e-3, errors


@pytest.mark.skipif("sd15" not in families(), reason="the pipeline is for SD1.x")
def test_one_step_pictures_are_equal_sd15(scene, loaded):
    """Without a student file: any base is run as a student by hand."""
    from vitrine.engine.emd import StudentPreset
    from vitrine.nodes.comfy.lora import NO_STUDENT

    s = scene("sd15")
    student = {"preset": "manual", "timestep": 999.0, "noise": "unit"}
    asked = {"positive": s.positive, "latent": s.latent(), "seed": 0, "student": NO_STUDENT}
    theirs = s.call("VitrineEMDOneStepGenerator", model=s.model, **asked, **student)[0]["samples"].clone()
    pipe, side = loaded("sd15").of("EMDOneStep"), 8 * theirs.shape[-1]
    how = {"height": side, "width": side, "output_type": "latent"}
    ours = pipe(PROMPT, [0], StudentPreset(timestep=999.0), **how).images
    assert away(ours / pipe.vae.config.scaling_factor, theirs) < 1e-3
