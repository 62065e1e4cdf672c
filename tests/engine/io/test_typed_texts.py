"""What people type into text fields: read, or refused in our own words, whatever the letters."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vitrine.engine.activations.correspondence import parse_clicks, parse_keypoints, parse_points
from vitrine.engine.control.gamma import read_points
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo.block import token_positions
from vitrine.engine.nemo.neurons import parse_neurons
from vitrine.engine.runtime.footprint import memory_bytes
from vitrine.engine.w2w import sliders_of
from vitrine.engine.w2w.space.labels import parse_labels

READERS = {
    "points": lambda text: parse_points(text, 64, 64),
    "clicks": lambda text: parse_clicks(text, 64, 64),
    "keypoints": lambda text: parse_keypoints(text, 1, (64, 64)),
    "curve": read_points,
    "tokens": token_positions,
    "neurons": parse_neurons,
    "labels": lambda text: parse_labels(text, ["a", "b"]),
    "memory": memory_bytes,
    "sliders": lambda text: sliders_of((text,), "="),
    "sliders of a node": lambda text: sliders_of(text.split(","), ":"),
}
STRANGE = (
    "", " ", "\ufeff", "²", "٣ ٣", "nan", "nan nan", "inf inf", "-1 -1", "1e999 0", "0x10 0", "1_0 2_0",
    "a 9" + "9" * 5000, "9" * 5000, "0:0, 0.5:nan", "1:2:3", "[", "[[[[", '{"positive": 3}', '[{"x": NaN, "y": 0}]',
    "{}", "[null]", "a: nan", "a=inf", "a:b:c", "a 1e400", "* 1", "[!] 1", "- -", "not", "not nan", "0.5 0.5; -", ";",
    "1-", "3-1", "GB", "nanGB", "1e9GB", '{"positive": [{"x": [1], "y": 1}]}', "[" * 5000, "\u2028", "\x00 1",
)  # fmt: skip


def numbers(value):
    """Every number in what a reader gives."""
    if isinstance(value, torch.Tensor):
        yield from value.double().flatten().tolist()
    elif isinstance(value, dict):
        for entry in value.values():
            yield from numbers(entry)
    elif isinstance(value, (list, tuple, set)):
        for entry in value:
            yield from numbers(entry)
    elif isinstance(value, (int, float)):
        yield value


def read(name, text):
    try:
        found = READERS[name](text)
    except VitrineError:
        return
    unknown = name in ("labels", "keypoints")  # NaN there says that nothing is known
    assert all(math.isfinite(n) or (unknown and math.isnan(n)) for n in numbers(found)), (name, text)


@pytest.mark.parametrize("name", READERS)
def test_strange_texts(name):
    for text in STRANGE:
        read(name, text)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None)
@example(text=",")
@example(text="0.5 0.5\n,")
@given(st.text(max_size=30) | st.text('0123456789.:;,-+eEnaif \n[]{}"xy', max_size=30))
def test_any_text(name, text):
    read(name, text)
