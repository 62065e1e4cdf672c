"""docs/full_size.md is what was measured, of everything there is; this runs without the checkpoints."""

import torch
from vitrine.engine import pipelines
from vitrine.engine.emd.variety import measure_variety
from vitrine_tests.full_size import measure, page
from vitrine_tests.full_size.notes import Following, note
from vitrine_tests.full_size.pipeline_cases import CASES
from vitrine_tests.full_size.test_notes import made_small

OTHER_FAMILY = {"ControlConditionedPixArtPipeline"} | {
    f"{method}TransformerPipeline" for method in ("ActivationTap", "Correspondence", "EMDOneStep", "Segmentation")
}


def test_the_page_is_what_was_measured():
    written = page.PAGE.read_text(encoding="utf-8")
    assert written == page.render(measure.known()), "VITRINE_FULL_SIZE=1 VITRINE_WRITE_DOCS=1 pytest tests/full_size"


def test_every_pipeline_has_its_case():
    ours = {name for name in pipelines.__all__ if name.endswith("Pipeline")}
    assert ours == OTHER_FAMILY | {name for name, _ in CASES if "." not in name}


def test_what_did_not_run_is_on_the_page():
    """A pipeline without a figure was left out of the table without a word."""
    lines = page.render({}).splitlines()
    for name, family in CASES:
        (line,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert line.split(" | ")[1 + (family == "sdxl")].strip(" |") == "not run yet"


def test_a_glob_in_a_note_is_typed_whole():
    following = Following.start("Find the same part (demo)", "sd15", {})
    (part,) = [p for p in note("Find the same part (demo)").split("; ") if p.startswith("set layers of Rank Layers")]
    following.follow(part)
    (ranker,) = following.of("Rank Layers")
    assert following.inputs(ranker)["places"] == "up-*"


def test_a_small_run_draws_enough_pictures_to_compare():
    graph = Following.start("Sample in one step (demo)", "sd15", {}).graph
    made_small(graph, "sd15")
    (drawn,) = [n["inputs"]["batch_size"] for n in graph.values() if n["class_type"] == "EmptyLatentImage"]
    variety = measure_variety(torch.randn(drawn, 8), torch.randn(drawn, 8))
    assert variety.precision is not None and variety.recall is not None
