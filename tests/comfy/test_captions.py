"""Words on what a node shows on itself: pictures enlarged, named above, their colours explained below."""

import pytest
import torch


@pytest.fixture(scope="module")
def captions(comfy):
    from vitrine.nodes import captions

    return captions


def test_small_pictures_grow_by_whole_pixels(captions):
    pictures = torch.rand(2, 64, 100, 3)
    grown = captions.enlarged(pictures)
    assert grown.shape == (2, 192, 300, 3) and torch.equal(grown[:, ::3, 1::3], pictures)
    assert captions.enlarged(grown) is grown


def test_the_picture_stands_between_the_lines_as_it_was(captions):
    pictures = torch.rand(2, 256, 256, 3)
    shown = captions.captioned(pictures, ["one", "two"], {"white": "found", "black": "rest"})
    assert shown.shape == (2, 256 + 2 * captions.LINE, 256, 3) and torch.equal(
        shown[:, captions.LINE : -captions.LINE], pictures
    )
    assert not torch.equal(shown[0, : captions.LINE], shown[1, : captions.LINE]), "each has its own name"
    assert (
        torch.equal(shown[0, -captions.LINE :], shown[1, -captions.LINE :])
        and shown[0, -captions.LINE :, 4:12].max() == 1
    ), "a white square"
    assert torch.equal(captions.captioned(pictures), pictures)


def test_a_long_name_loses_its_middle_and_ends(captions):
    """Both ends of an address say more than its middle; the loop that shortens ends also where nothing fits."""
    pictures = torch.rand(1, 256, 256, 3)
    long = captions.captioned(pictures, ["up-level0-" + 60 * "x" + "-cross-q"])
    assert (
        long.shape == (1, 256 + captions.LINE, 256, 3)
        and long[0, : captions.LINE, :60].max() > 0.5 < long[0, : captions.LINE, 180:].max()
    )
    with pytest.raises(ValueError, match="zip"):
        captions.captioned(pictures, ["one", "two"])


def test_bands_stand_below_their_names(captions):
    bands = {"one": torch.rand(8, 512, 3), "two": torch.rand(16, 512, 3)}
    shown, line = captions.banded(bands, {"white": "found"}), captions.LINE
    assert shown.shape == (1, 8 + 16 + 3 * line, 512, 3)
    assert torch.equal(shown[0, line : line + 8], bands["one"])
    assert torch.equal(shown[0, 2 * line + 8 : -line], bands["two"])
    assert shown[0, -line:, 4:12].max() == 1


def test_found_neurons_are_drawn_layer_by_layer(comfy, captions):
    from vitrine.engine.nemo import NeuronSet
    from vitrine.nodes.nemo import by_layer

    shown = by_layer(NeuronSet({"mid": (7,)}), {"down": 64, "mid": 96})
    assert shown.shape == (1, 8 + 16 + 3 * captions.LINE, 512, 3)
    bright = (shown[0] == torch.tensor([1.0, 0.78, 0.24])).all(-1)
    rows, columns = bright[: -captions.LINE].nonzero().unbind(1)
    assert len(rows) == 64 and columns.min() == 56 and columns.max() == 63 and rows.min() == 8 + 2 * captions.LINE
