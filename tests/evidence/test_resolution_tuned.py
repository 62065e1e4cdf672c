"""The short fine-tune at 256 px: resumed bit for bit, settings kept, the shipped model as it was; the claim."""

from dataclasses import replace

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine.evidence.resolution import positions
from vitrine.evidence.resolution.tuned import TuneConfig, tune
from vitrine.evidence.resolution.tuned_claims import MODE, judged

SMALL = TuneConfig(steps=3, pictures=2, batch=1, rank=2, lr=1e-2)


def weights(model):
    return {name: p for name, p in model.transformer.named_parameters() if "lora" in name}


@pytest.mark.nightly
def test_a_stopped_run_is_the_same_run(tmp_path, no_hooks_left):
    whole = weights(tune(tmp_path / "whole", SMALL))
    tune(tmp_path / "parts", SMALL, until=1)
    model = tune(tmp_path / "parts", SMALL)
    parts = weights(model)
    assert parts and all(torch.equal(parts[name], whole[name]) for name in whole)
    assert any(float(p.abs().max()) > 0 for name, p in parts.items() if "lora_B" in name), "it learned"
    other = weights(tune(tmp_path / "parts", replace(SMALL, seed=1)))
    assert not all(torch.equal(other[name], whole[name]) for name in whole)
    with pytest.raises(VitrineError, match="begun with"):
        tune(tmp_path / "parts", replace(SMALL, lr=1e-3))
    no_hooks_left(model.transformer)
    assert not weights(load_flow_portraits())


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"positions": "rope_pi_dynamic"}])
def test_settings_are_checked(wrong):
    with pytest.raises(VitrineError):
        TuneConfig(**wrong)


def look(*hits):
    hits = torch.tensor(hits)
    return positions.Look(hits, 100.0, 0.5, torch.ones(len(hits)), hits / 10)


def test_every_seed_must_gain():
    rows = {positions.ENLARGED: look(1.0, 1.0, 1.0), MODE: look(0.5, 0.6, 0.7)}
    better, same = look(0.8, 0.9, 0.9), look(0.5, 0.6, 0.7)
    assert judged({(256, 256): rows | {"seed 0": better, "seed 1": better}}).holds
    result = judged({(256, 256): rows | {"seed 0": better, "seed 1": same}})
    assert not result.holds and result.value == pytest.approx((0.6 + 2.6 / 3) / 2, abs=1e-3)
