"""The notes "Your own model" and the templates on half of the transformer families; see family_notes.py."""

import pytest
import torch
from vitrine_tests.comfy.family_notes import (  # noqa: F401
    batches,
    test_flat_attention_is_refused_plainly,
    test_the_note_can_be_followed,
    test_the_note_for_transformers_can_be_followed,
    test_the_template_runs,
    users_of,
)
from vitrine_tests.comfy.tiny_checkpoints import WIDTHS
from vitrine_tests.lanes import nightly_but

tiny = users_of(nightly_but(list(WIDTHS)[::2]))


def test_a_video_has_no_score(comfy):
    """NEMO compares still pictures; a latent with several frames is refused, one frame is a picture."""
    from vitrine.engine.errors import VitrineError
    from vitrine.nodes.nemo import shape_of

    assert shape_of(torch.zeros(1, 16, 8, 12)) == shape_of(torch.zeros(1, 16, 1, 8, 12)) == (16, 8, 12)
    with pytest.raises(VitrineError, match="a video of 3 latent frames"):
        shape_of(torch.zeros(1, 16, 3, 8, 12))
