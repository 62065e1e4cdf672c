"""What a LoRA file says of itself, what is broken in it, what it is near to, and what a report asks of it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from vitrine.engine.copies.lora_contents import files_to_compare, health_of, merge_of, names_of, neighbours_in
from vitrine.engine.copies.lora_samples import CAPTION, NATURAL, ORDINARY, TRIGGER, natural, prompts_of, rare_words
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.lora_layer import LoraLayer
from vitrine.engine.io.lora_writing import write_lora
from vitrine.engine.w2w.loras.lora_facts import facts_of
from vitrine.engine.w2w.loras.lora_files import read_header
from vitrine_tests.engine.small_loras import deltas, lora
from vitrine_tests.engine.wild import CASES

KOHYA = {
    "ss_network_module": "networks.lora",
    "ss_steps": "1200",
    "ss_learning_rate": "0.0001",
    "ss_base_model_version": "sd_v1",
    "modelspec.license": "CC-BY-4.0",
    "ss_dataset_dirs": json.dumps({"10_zorbal person": {"n_repeats": 10, "img_count": 5}}),
    "ss_tag_frequency": json.dumps({"10_zorbal person": {"zorbal person": 5, "a red hat": 2}}),
}


def written(folder, name, tensors=None, header=None):
    path = write_lora(folder / f"{name}.safetensors", lora(1) if tensors is None else tensors)
    if header is not None:
        save_file(load_file(path), path, header)
    return path


def test_a_kohya_header_is_read(tmp_path):
    facts = facts_of(written(tmp_path, "a", header=KOHYA))
    assert "kohya" in facts.trainer and facts.licence == "CC-BY-4.0" and facts.triggers == ("zorbal person",)
    assert facts.training["steps"] == "1200" and facts.training["pictures"] == "5, repeated 10 times"
    assert facts.tags == {"zorbal person": 5, "a red hat": 2} and "tags" in facts.trigger_source
    table = json.loads(json.dumps(facts.to_dict()))
    assert table["layers"] == 3 and table["ranks"] == [1] and not table["refused"]
    strange = facts_of(written(tmp_path, "b", header={"ss_tag_frequency": "[1", "ss_dataset_dirs": "[]"}))
    assert not strange.triggers and not strange.tags and not strange.training
    with pytest.raises(VitrineError, match="LoRA file"):
        facts_of(tmp_path / "none.safetensors")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.writer}-{case.file}"[:60])
def test_wild_files_are_described_or_refused_by_name(case, tmp_path):
    path, _ = case.make(tmp_path)
    facts = facts_of(path)
    assert json.dumps(facts.to_dict()) and facts.trainer
    if case.outcome.startswith("read") and "base weights" not in case.outcome:
        health = health_of(facts.file)
        assert len(health.layers) == len(facts.file.entries) and not health.broken("NaN or infinite")
        assert sum(health.fractions("kind").values()) == pytest.approx(1) == sum(health.fractions("block").values())
    else:
        assert facts.file is None and facts.problem


def test_shares_are_those_of_the_change_and_broken_layers_are_named(tmp_path):
    layers = lora(1, rank=4)
    health = health_of(read_header(written(tmp_path, "whole", layers)))
    squares = {path: float(change.double().square().sum()) for path, change in deltas(layers).items()}
    assert health.total == pytest.approx(sum(squares.values()), rel=1e-5) and not health.to_dict()["broken"]
    assert health.fractions("kind")["cross-attention: value"] == pytest.approx(
        squares["down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_v"] / sum(squares.values()), rel=1e-5
    )
    assert set(health.fractions("block")) == {"down_blocks.0", "mid_block"} and 1 < health.used < 4
    (first, a), (second, b), (third, c) = layers.items()
    spoilt = {
        first: a,
        second: LoraLayer(b.down, torch.zeros_like(b.up), b.alpha),
        third: LoraLayer(torch.full_like(c.down, 65504.0), c.up, c.alpha),
    }
    path = written(tmp_path, "spoilt", spoilt)
    tensors = {k: v.half() for k, v in load_file(path).items()}
    next(v for k, v in tensors.items() if "attn1_to_q.lora_up" in k)[0, 0] = torch.nan
    save_file(tensors, path)
    broken = health_of(read_header(path))
    assert broken.broken("NaN or infinite") == [first] and broken.broken("changes nothing") == [second]
    assert broken.broken("at the end of its number format") == [third] and broken.total == 0
    single = {path: LoraLayer(v.down[:1].repeat(4, 1), v.up, v.alpha) for path, v in layers.items()}
    assert health_of(read_header(written(tmp_path, "single", single))).used == pytest.approx(1, rel=1e-5)


def test_merges_are_weighted_sums_of_few():
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 400, generator=g)
    names = list("abcdef")
    merge = merge_of(0.6 * rows[0] + 0.4 * rows[3], rows, "m", names)
    assert dict(merge.parts) == pytest.approx({"a": 0.6, "d": 0.4}, abs=1e-3) and merge.residual < 0.01
    assert merge_of(torch.randn(400, generator=g), rows, "m", names) is None
    assert merge_of(rows[0] * 2, rows[:1], "m", names) is None


def test_neighbours_of_one_among_files(tmp_path):
    first, second = lora(1), lora(2)
    both = {}
    for path, a in first.items():
        b = second[path]
        down, up = torch.cat([a.down, b.down]), torch.cat([0.7 * a.up, 0.3 * b.up], 1)
        both[path] = LoraLayer(down, up, 2 * a.alpha)
    named = {"one": first, "two": second, "three": lora(3), "sum": both}
    paths = {name: written(tmp_path, name, layers) for name, layers in named.items()}
    twin = written(tmp_path / "sub", "twin", first)
    files = files_to_compare([paths["one"]], tmp_path)
    assert len(files) == 5
    near = neighbours_in(read_header(paths["one"]), files)
    assert near.compared == 4 and [{c.first, c.second} for c in near.copies] == [{"one", "twin"}]
    assert near.alike[0][0] == "twin" and near.alike[0][1] == pytest.approx(1, abs=1e-4)
    merged = neighbours_in(read_header(paths["sum"]), [p for p in files if p != twin])
    assert dict(merged.merge.parts) == pytest.approx({"one": 0.7, "two": 0.3}, abs=1e-3) and not merged.copies
    assert neighbours_in(read_header(paths["one"]), []).compared == 0
    assert names_of([paths["one"], twin]) == ["one", "twin"]


def test_prompts_of_a_report(tmp_path):
    facts = facts_of(written(tmp_path, "a", header=KOHYA))
    captions = ["zorbal person with a red hat, smiling", "zorbal person"]
    asked = prompts_of(facts, captions, (), ("a dog", "a street"), 4)
    assert [(p.text, p.kind) for p in asked] == [
        ("zorbal person with a red hat, smiling", CAPTION),
        ("zorbal person", CAPTION),
        ("person with a red hat, smiling", NATURAL),
        ("a dog", ORDINARY),
        ("a street", ORDINARY),
    ]
    from_tags = prompts_of(facts, (), (), ("a dog", "a street"))
    assert from_tags[0].text == "zorbal person, a red hat" and from_tags[1].kind == TRIGGER
    silent = facts_of(written(tmp_path, "b", header={}))
    assert {p.kind for p in prompts_of(silent, (), (), ("a dog", "a street"))} == {CAPTION}
    assert natural("xq7, , a cat, xq7", {"xq7"}) == "" and natural("a blue cup, xq7", {"xq7"}) == "a blue cup"
    assert rare_words(["a klynth cup"], (), lambda word: 2 if word == "klynth" else 1) == {"klynth"}
