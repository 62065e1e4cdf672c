"""The notes "Your own model" and the templates on the other transformer families; see family_notes.py."""

import pytest
from vitrine_tests.comfy.family_notes import (  # noqa: F401
    batches,
    test_flat_attention_is_refused_plainly,
    test_the_note_can_be_followed,
    test_the_note_for_transformers_can_be_followed,
    test_the_template_runs,
    users_of,
)
from vitrine_tests.comfy.tiny_checkpoints import WIDTHS

pytestmark = pytest.mark.nightly

tiny = users_of(list(WIDTHS)[1::2])
