"""Nothing is fine by default: over all subsets of what is measured, no fine verdict hides a part that is missing."""

from itertools import product
from pathlib import Path

import pytest
import torch
from vitrine.engine.copies.copy_check import CheckConfig, CheckedPrompt, CopyCheck
from vitrine.engine.copies.lora_contents import LayerHealth, LoraHealth, Neighbours
from vitrine.engine.copies.lora_findings import Cost, Findings, PromptCopies
from vitrine.engine.copies.lora_samples import CAPTION, ORDINARY, Loading
from vitrine.engine.settings.verdicts import FINE, LOOK, OPEN, verdict_of
from vitrine.engine.w2w.loras.adapters import Entry
from vitrine.engine.w2w.loras.lora_facts import LoraFacts
from vitrine.engine.w2w.loras.lora_files import LoraFile

PATH = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k"
PARTS = (
    "model",
    "own change",
    "ordinary change",
    "first prompt",
    "second prompt",
    "strength",
    "variety",
    "drift",
    "others",
)


def facts(path=PATH, alpha=2.0, dialect="kohya", said="", file="a.safetensors"):
    entry = Entry("LoRA", (), (2, 768), (320, 2), alpha)
    known = LoraFile(Path(file), "a", dialect, {path: entry}, 0, (), ("F32",), said, "Stable Diffusion 1.x")
    return LoraFacts(Path(file), 100, known, "", "kohya")


def health(path=PATH):
    return LoraHealth((LayerHealth(path, 1.0, 2, 1.5),))


def prompt(text, kind=CAPTION):
    return PromptCopies(text, kind, 4, 0.3, 0.31, 0, None, None, 0.9, 0.0, torch.zeros(1), torch.zeros(1))


def findings(have):
    changes = {"a": [0.2] * 5} if "own change" in have else {}
    changes |= {"o": [0.1] * 5} if "ordinary change" in have else {}
    copies = [prompt("a")] if "first prompt" in have else []
    copies += [prompt("b")] if "second prompt" in have else []
    copies += [prompt("o", ORDINARY)] if "drift" in have else []
    cost = Cost((0.3, 0.29) if "variety" in have else None, None, 0.1 if "drift" in have else None)
    return Findings(
        "a",
        facts(),
        health(),
        loadings=(Loading("diffusers", 1, 1),) if "model" in have else (),
        changes=changes,
        kinds={"a": CAPTION, "b": CAPTION, "o": ORDINARY},
        copies=copies,
        cost=cost,
        strengths={0.5: {"lost": 0.0}} if "strength" in have else {},
        neighbours=Neighbours(3) if "others" in have else None,
        asked={"a": CAPTION, "b": CAPTION, "o": ORDINARY},
        asked_strengths=(0.5,),
        asked_changes=("a", "o"),
    )


def test_with_everything_measured_it_is_fine():
    assert findings(PARTS).verdict == "fine: 5 of 5 measured"


def test_no_subset_of_what_is_measured_is_fine():
    """Each part that is missing changes a sentence too, and the count is that of the measured parts."""
    whole = [s.text for s in findings(PARTS).summary]
    for chosen in product((False, True), repeat=len(PARTS)):
        have = [part for part, use in zip(PARTS, chosen, strict=True) if use]
        f = findings(have)
        measured = sum(s.verdict != OPEN for s in f.summary)
        assert f.verdict.endswith(f": {measured} of 5 measured")
        if len(have) < len(PARTS):
            assert [s.text for s in f.summary] != whole
            if have != [part for part in PARTS if part != "model"]:
                assert f.worst in (LOOK, "bad"), have
            for s in f.summary:
                assert s.verdict != FINE or s.text in whole or "was not tried" in s.text, (have, s)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": "distilbert.transformer.layer.0.attention.q_lin"}, "no modules of an image model"),
        ({"path": "model.layers.0.self_attn.q_proj"}, "no modules of an image model"),
        ({"alpha": None, "dialect": "PEFT"}, "adapter_config.json is missing"),
        ({"said": "sdxl_base_v1-0"}, "Its header names sdxl_base_v1-0, its layers are of Stable Diffusion 1.x"),
    ],
)
def test_what_a_file_does_not_say_is_said(changes, words):
    assert findings(PARTS).summary[0].verdict == FINE
    f = Findings("a", facts(**changes), health(changes.get("path", PATH)))
    assert f.summary[0].verdict == LOOK and words in f.summary[0].text and f.worst == LOOK


def test_a_verdict_counts():
    assert verdict_of([FINE] * 5) == "fine: 5 of 5 measured"
    assert verdict_of([FINE, OPEN, OPEN]) == "look: 1 of 3 measured"
    assert verdict_of([OPEN]) == "not measured: 0 of 1 measured"
    assert verdict_of(["bad", OPEN]) == "bad: 1 of 2 measured"


@pytest.mark.parametrize(
    ("near", "verdict"),
    [
        ((), "fine: 2 of 2 prompts measured, 8 samples each"),
        ((0,), "look: 2 of 2"),
        ((0, 1, 2), "bad: 2 of 2"),
    ],
)
def test_a_copy_check_begins_with_its_verdict(near, verdict):
    ratios = [torch.full((8,), 0.9) for _ in range(2)]
    ratios[1][list(near)] = 0.1
    zeros = torch.zeros(8)
    prompts = [CheckedPrompt("a", "", r, zeros.long(), zeros, zeros, zeros.long(), range(8)) for r in ratios]
    check = CopyCheck(prompts, ["x"], 0.2, CheckConfig())
    assert check.text().startswith(verdict) and "no threshold was calibrated" in check.text()
