"""Patterns of a LoRA's settings are read as names, exactly as PEFT matches them, and never run."""

import json

import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w.loras.lora_files import read_lora
from vitrine.engine.w2w.loras.name_patterns import NameTable, names_of

PATHS = [
    f"{root}.{i}.{layer}"
    for root in ("down_blocks.0.attentions", "up_blocks.10.attentions", "mid")
    for i in (0, 1, 12)
    for layer in ("attn1.to_q", "attn1.to_v", "attn2.to_q", "attn2.to_out.0", "ff.net.0.proj", "proj_in")
]
TABLES = [
    {"to_q": 1, "attn1.to_q": 2},
    {"attn1.to_q": 2, "to_q": 1},
    {r"attn1\.to_(q|v)": 2, "to_v": 3},
    {r"attn[12]\.to_q": 16, "proj_in": 2},
    {r"^mid\.0\.attn1\.to_q$": 5, "to_q": 6},
    {"^mid.0.attn1.to_q": 5, "0.attn1.to_q": 6},
    {r".*\.to_out\.0": 7, r"(attn2|ff\.net)\.to_out\.0": 8},
    {"o_q": 1, "0": 4},
]


def test_names_fit_as_in_peft():
    for table in TABLES:
        names = NameTable(table)
        for path in PATHS:
            assert names.value(path, None) == table.get(get_pattern_key(table, path)), (table, path)


def test_what_is_no_name_is_refused():
    for key in (
        "([a-z0-9_.]+)+!",
        "(a+)+$",
        "a*",
        "to_q.*",
        r"\d+",
        "(?=x)",
        "((a|b)|c)",
        "",
        "[a-z]",
        "to_q{9}",
        "a" + "(a|a)" * 40,
    ):
        with pytest.raises(VitrineError, match="LoRA pattern"):
            names_of(key)
    with pytest.raises(VitrineError, match="more than"):
        NameTable({f"x{i}(a|b|c|d)(a|b|c|d)(a|b|c|d)(a|b|c|d)": 1 for i in range(500)})


@pytest.mark.parametrize("beside", [True, False])
def test_a_pattern_made_to_hang_is_refused_at_once(tmp_path, beside):
    """As a file beside the LoRA, and in its header."""
    stem = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    factors = {f"{stem}.lora_A.weight": torch.ones(1, 4), f"{stem}.lora_B.weight": torch.ones(4, 1)}
    settings = {"r": 1, "lora_alpha": 1, "alpha_pattern": {"([a-z0-9_.]+)+!": 2}}
    header = {"lora_adapter_metadata": json.dumps({f"unet.{k}": v for k, v in settings.items()})}
    path = tmp_path / "adapter_model.safetensors"
    save_file(factors, path, metadata=None if beside else header)
    if beside:
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(VitrineError, match="LoRA pattern"):
        read_lora(path)
