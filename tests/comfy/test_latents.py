"""A LATENT that is no picture's, at every node that takes one: refused before any work, by one sentence."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine_tests.comfy.controlled import NEGATIVE, POSITIVE, RUN, close, seeded, xl_twins
from vitrine_tests.comfy.guided_graphs import NEURONS, encoded

COMPARED = {"VitrineCollectTaps"}
"""It only asks which run a LATENT came out of."""
SAMPLED = {"VitrineControlConditionedSampler"}
"""As KSampler: a noise mask and `batch_index` act."""


def odd():
    """Name -> LATENT."""
    from comfy.nested_tensor import NestedTensor

    picture, sound = torch.zeros(1, 4, 16, 16), torch.zeros(1, 8, 16)
    return {
        "a noise mask": {"samples": picture, "noise_mask": torch.ones(1, 1, 16, 16)},
        "sound": {"samples": torch.zeros(1, 64, 16), "type": "audio"},
        "sound of a picture's shape": {"samples": torch.zeros(1, 8, 16, 16), "type": "audio"},
        "a video with sound": {"samples": NestedTensor((picture, sound))},
        "a video": {"samples": torch.zeros(1, 4, 3, 16, 16)},
        "no picture": {"samples": picture[:0]},
        "NaN": {"samples": picture * torch.nan},
        "no samples": {},
    }


def taking():
    """Node id -> the inputs that are LATENTs."""
    from vitrine.nodes import NODES

    found = {}
    for node in NODES:
        schema = node.define_schema()
        names = [i.id for i in schema.inputs if i.io_type == "LATENT"]
        found |= {schema.node_id: names} if names else {}
    return found


@pytest.fixture(scope="module")
def calls(comfy):
    """Node id -> what else it is called with."""
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    positive, negative = (encoded(clip)[name] for name in ("positive", "negative"))
    prompt, texts = {"model": model, "positive": positive}, {"model": model, "clip": clip, "prompts": "a\nb\nc\nd"}
    small = {"latent": {"samples": torch.zeros(1, 4, 16, 16)}, "measure": "statistics"}
    calibration = {"calibration": comfy.call("VitrineNEMOCalibrate", **small, **texts)[0]}
    models = {"model": model, "clip": clip, "vae": vae, "pictures": torch.zeros(1, 64, 64, 3), "ordinary": "a\nb"}
    one = {"student": "(the model is the student)", "preset": "manual", "timestep": 999.0, **prompt}
    return {
        "VitrineNEMOCalibrate": texts,
        "VitrineNEMODetect": prompt | {"negative": negative},
        "VitrineNEMOFindNeurons": prompt | calibration,
        "VitrineNEMOVerify": prompt | {"neurons": NEURONS, "tau": 0.3, "attack_steps": 1},
        "VitrineNEMOCopyCheck": models | {"prompts": "a"},
        "VitrineEMDOneStepGenerator": one,
        "VitrineLoRAReport": models,
        "VitrineControlConditionedSampler": {"model": xl_twins().model, "positive": POSITIVE, "negative": NEGATIVE},
    }


def call(comfy, node_id, **inputs):
    """With the page's defaults for what is not given."""
    given = {}
    for i in comfy.nodes.NODE_CLASS_MAPPINGS[node_id].define_schema().inputs:
        default, options = getattr(i, "default", None), getattr(i, "options", None)
        if not i.optional and (default is not None or options):
            given[i.id] = options[0] if default is None else default
    return comfy.call(node_id, **(given | inputs))


def test_what_is_no_pictures_latent_is_refused(comfy, calls):
    assert set(taking()) == {*calls, *COMPARED}, "a new node needs its case"
    good = {"samples": torch.zeros(1, 4, 16, 16)}
    for node_id, names in taking().items():
        if node_id in COMPARED:
            continue
        for name in names:
            others = {other: good for other in names if other != name}
            for what, latent in odd().items():
                if node_id in SAMPLED and "noise_mask" in latent:
                    continue
                with pytest.raises(VitrineError, match=f"^({name}|latent): given "):
                    call(comfy, node_id, **{name: latent}, **others, **calls[node_id])
                    pytest.fail(f"{node_id} took {what} as {name}")
    others = {other: good for other in taking()["VitrineNEMOVerify"] if other != "reference"}
    with pytest.raises(VitrineError, match="latent: given 16 channels"):
        other = {"samples": torch.zeros(1, 16, 16, 16)}
        call(comfy, "VitrineNEMOVerify", reference=other, **others, **calls["VitrineNEMOVerify"])


@pytest.mark.parametrize("count", [-1, 100_001])
def test_components_of_no_number_of_them(comfy, count):
    space = comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=4)[0]
    for node_id in ("VitrineLoadW2WSpace", "VitrineW2WSample", "VitrineTrainW2WDirection", "VitrineBuildW2WSpace"):
        with pytest.raises(VitrineError, match=rf"^components: given {count}; accepted: 0 to 100000"):
            given = {} if node_id in ("VitrineLoadW2WSpace", "VitrineBuildW2WSpace") else {"space": space}
            call(comfy, node_id, components=count, **given)
    for bad in (-1, 0):
        with pytest.raises(VitrineError, match="components: given"):
            space.first(bad)


def test_no_latent_is_made_of_nan(comfy, calls):
    told = calls["VitrineEMDOneStepGenerator"]
    text, settings = told["positive"][0]
    for factor, reason in ((torch.nan, "^prompt: given NaN"), (1e37, "^picture: given NaN")):  # the second overflows
        spoilt = {"positive": [[text * factor, settings]]}
        with pytest.raises(VitrineError, match=reason):
            call(comfy, "VitrineEMDOneStepGenerator", latent={"samples": torch.zeros(1, 4, 16, 16)}, **told | spoilt)


@pytest.mark.parametrize(
    "more",
    [{}, {"batch_index": [2]}, {"noise_mask": (seeded(1, 1, 64, 64) > 0).float()}],
    ids=["plain", "a picture of a batch", "a noise mask"],
)
def test_the_sampler_starts_as_cores_does(comfy, calls, more):
    from vitrine.engine.control import SizeCondition
    from vitrine.nodes.comfy.conditioning import with_sizes

    told = calls["VitrineControlConditionedSampler"]
    start, own = {"samples": seeded(1, 4, 8, 8) * 0.1, **more}, SizeCondition((64, 64), (0, 0), (64, 64))
    run = {"latent_image": start, "cfg": 3.0, "size_guidance": 1.0, "form": "constant", "width": 0, "height": 0, **RUN}
    found = call(comfy, "VitrineControlConditionedSampler", **run, **told)[0]
    prompts = [with_sizes(told[name], own, (64, 64)) for name in ("positive", "negative")]
    with torch.inference_mode():
        sampler = comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]()
        sizes = (RUN["seed"], RUN["steps"], 3.0, RUN["sampler_name"], RUN["scheduler"])
        expected = sampler.sample(told["model"], *sizes, *prompts, start, RUN["denoise"])[0]
    assert close(found["samples"], expected["samples"]) and set(found) == set(expected)
