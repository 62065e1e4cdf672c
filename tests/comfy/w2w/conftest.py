"""The shipped model, its pipeline, the space of people and one person, for each file of W2W node tests."""

import pytest
import torch
from vitrine.engine.pipelines import W2WPipeline
from vitrine.engine.portraits import load_portraits
from vitrine_tests.comfy.w2w.scene import PROMPT


@pytest.fixture(scope="module")
def loaded(comfy):
    return comfy.call("VitrineLoadPortraits")


@pytest.fixture(scope="module")
def pipe():
    made = W2WPipeline.from_pipe(load_portraits().pipeline())
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def space(comfy):
    return comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]


@pytest.fixture(scope="module")
def positive(loaded):
    with torch.inference_mode():
        return loaded[1].encode_from_tokens_scheduled(loaded[1].tokenize(PROMPT))


@pytest.fixture(scope="module")
def person(comfy, space):
    return comfy.call("VitrineW2WSample", space=space, seed=4, spread=1.0, components=0, truncation=0.0, wanted="")[0]
