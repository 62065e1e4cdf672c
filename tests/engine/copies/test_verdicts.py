"""Nothing is fine by default: over all subsets of what is measured, no fine verdict hides a part that is missing."""

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.copies.copy_check import CheckConfig, CheckedPrompt, CopyCheck
from vitrine.engine.copies.lora_contents import LayerHealth, LoraHealth, Neighbours, health_of
from vitrine.engine.copies.lora_findings import Cost, Findings, PromptCopies
from vitrine.engine.copies.lora_samples import CAPTION, ORDINARY, Loading
from vitrine.engine.copies.training_runs import CopiesAtStep, runs_among, training_run, with_copies
from vitrine.engine.settings.verdicts import BAD, FINE, LOOK, OPEN, verdict_of
from vitrine.engine.w2w.loras.adapters import Entry
from vitrine.engine.w2w.loras.lora_facts import LoraFacts
from vitrine.engine.w2w.loras.lora_files import LoraFile, read_header

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


@pytest.mark.parametrize("trained_with_pictures", [False, True])
@pytest.mark.parametrize("tau", [None, 0.5])
@pytest.mark.parametrize("scores", list(product((None, 0.1, 0.9), repeat=2)))
def test_a_copy_check_says_what_it_did_not_measure(trained_with_pictures, tau, scores):
    """Training pictures, the threshold of NeMo's score and the scores: whatever is missing is in the text."""
    zeros, ratios = torch.zeros(4), torch.full((4,), 0.9)
    rows = (ratios, zeros.long(), zeros, zeros, zeros.long(), range(4))
    prompts = [CheckedPrompt(name, "", *rows, score) for name, score in zip("ab", scores, strict=True)]
    text = CopyCheck(prompts, ["x"] if trained_with_pictures else [], 0.2, CheckConfig(seeds=4), tau).text()
    assert text.startswith("fine: 2 of 2 prompts measured, 4 samples each")
    assert ("No training picture was given" in text) == (not trained_with_pictures)
    assert ("no threshold was calibrated" in text) == (tau is None)
    known = [score for score in scores if score is not None]
    said = f"NeMo's score, measured of {len(known)} of 2 prompts, calls {sum(s > 0.5 for s in known)} memorized"
    assert (said in text) == (tau is not None)


def straight(count):
    """A run whose checkpoints go one way."""
    sizes = torch.arange(1.0, count + 1)
    return training_run("run", [str(i) for i in range(count)], sizes[:, None] * sizes)


def test_a_run_of_checkpoints_says_of_how_many():
    """Over all subsets of its checkpoints that were sampled; one that copies is bad."""
    clean, copying = CopiesAtStep(0, 4, 0.1, False), CopiesAtStep(4, 4, 0.9, True)
    assert straight(4).verdict == FINE
    for rows in product((None, clean, copying), repeat=4):
        run = with_copies(straight(4), rows)
        sampled = sum(row is not None for row in rows)
        assert run.verdict == (BAD if copying in rows else FINE)
        (_, line) = run.lines()
        assert "Measured: the weights of 4 of 4 checkpoints" in line
        assert (f", samples of {sampled}." in line) == bool(sampled)
        assert ("none was sampled, so copies were not looked for" in line) == (not sampled)


def lora_file(path, scale=1.0, width=320, **others):
    stem = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
    factors = {
        "lora_down": torch.randn(2, 768, generator=torch.manual_seed(1)),
        "lora_up": torch.ones(width, 2) * scale,
    }
    save_file({f"{stem}.{role}.weight": tensor for role, tensor in factors.items()} | others, path)
    return path


@pytest.mark.parametrize("strange", ["other layers", "cut short"])
def test_a_checkpoint_that_is_not_measured_is_named(tmp_path, strange):
    files = [lora_file(tmp_path / f"style-{step:06d}.safetensors", step) for step in (1, 2, 3, 4)]
    last = lora_file(tmp_path / "style-000005.safetensors", 5.0, 640 if strange == "other layers" else 320)
    if strange == "cut short":
        last.write_bytes(last.read_bytes()[:-100])
    (run,) = runs_among([read_header(file) for file in files], [last])
    assert run.verdict == FINE and "the weights of 4 of 5 checkpoints (not of style-000005)" in run.lines()[1]


TEXT = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
OTHERS = {f"{TEXT}.lora_down.weight": (2, 768), f"{TEXT}.lora_up.weight": (768, 2), "bundle_emb.a.clip_l": (2, 8)}


@pytest.mark.parametrize("broken", [None, *OTHERS])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_beside_the_network_is_looked_at_too(tmp_path, broken, number):
    """A text encoder's layers and embeddings: NaN there was fine, and they were not named."""
    others = {key: torch.full(shape, number if key == broken else 1.0) for key, shape in OTHERS.items()}
    plain = read_header(lora_file(tmp_path / "plain.safetensors"))
    file = read_header(lora_file(tmp_path / "a.safetensors", **others))
    sentences = []
    for known in (plain, file):
        known_facts = LoraFacts(known.path, 100, known, "", "kohya")
        sentences.append(Findings("a", known_facts, health_of(known), loadings=(Loading("x", 1, 1),)).summary[0])
    assert sentences[0].verdict == FINE and "NaN alone" not in sentences[0].text
    assert "Looked at for NaN alone: 1 layers of text encoders, embeddings" in sentences[1].text
    assert sentences[1].verdict == (FINE if broken is None else BAD)
    assert broken is None or f"1 other tensors contain NaN or infinity, first {broken}" in sentences[1].text
