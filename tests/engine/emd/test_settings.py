"""What a run's settings mean, and that those of old runs are read."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.emd import EStepConfig
from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from vitrine.engine.errors import VitrineError
from vitrine_tests.emd_runs import trainer


@pytest.mark.nightly
def test_each_score_update_has_a_batch_of_its_own(tmp_path):
    """All of them saw one z and one set of prompts."""
    run, seen = trainer(tmp_path, score_updates=3), []
    update = run._score_update
    run._score_update = lambda batches: seen.append((batches[0][0].text, batches[0][1])) or update(batches)
    run.step()
    assert len(seen) == 3
    assert not any(torch.equal(seen[i][1], seen[j][1]) for i, j in ((0, 1), (0, 2), (1, 2)))
    run.step()
    assert len({tuple(text.flatten().tolist()) for text, _ in seen}) > 1, "prompts as well"


@pytest.mark.nightly
def test_z_moves_unless_it_is_told_to_stay(tmp_path):
    """Without calibration gz was 0 by default, and so z stayed where it was without a word."""
    assert trainer(tmp_path / "given", auto_gz=False).chain.gz == 0.01
    assert trainer(tmp_path / "measured").chain.gz > 0
    assert trainer(tmp_path / "frozen", chain=EStepConfig(2, gz=0.0)).chain.gz == 0, "also with auto_gz"
    assert EMDTrainConfig().advanced.weight == "uniform", "EMD's own"


OLD_CONFIG = {
    "steps": 4, "batch": 2, "timestep": 999.0, "rank": 2, "auto_gz": False, "score_updates": 1, "lr_generator": 1e-4,
    "lr_score": 5e-4, "guidance": 2.0, "weight": "uniform", "ema": 0.9, "seed": 3, "save_every": 1, "meter_every": 2,
    "chain": {"steps": 2, "ge": 0.16, "gz": 0.0, "estimator": "cancel", "clip": None}, "student": "lora",
    "dtype": "float32", "checkpointing": False, "grid_every": 0, "decay": 0.5,
}  # fmt: skip
"""The settings as a run wrote them before the rare ones were split off."""


def test_settings_of_old_runs_are_read():
    config = EMDTrainConfig.from_dict(OLD_CONFIG)
    assert config == EMDTrainConfig(
        4, 2, rank=2, chain=EStepConfig(2, gz=0.0), guidance=2.0, seed=3, timestep=999.0,
        advanced=EMDAdvancedConfig(False, "uniform", 0.9, 0.5, save_every=1, meter_every=2),
    )  # fmt: skip
    assert EMDTrainConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    longer = EMDTrainConfig.from_dict(OLD_CONFIG | {"steps": 8, "checkpointing": True, "save_every": 7})
    assert longer.differences(config) == ["steps 4 (now 8)"], "its rates fall towards another end"
    steady = EMDTrainConfig.from_dict(OLD_CONFIG | {"decay": 0.0})
    assert not EMDTrainConfig.from_dict(OLD_CONFIG | {"decay": 0.0, "steps": 8, "grid_every": 1}).differences(steady)
    measured = EMDTrainConfig.from_dict(OLD_CONFIG | {"auto_gz": True})
    given = EMDTrainConfig.from_dict(OLD_CONFIG | {"chain": {"steps": 2, "gz": 0.01, "clip": 20.0}})
    walked = EStepConfig(2, gz=0.01, clip=20.0)
    assert not given.differences(measured, walked), "the gz that the run measured may be written out"
    assert not replace(measured, chain=EStepConfig(2)).differences(measured, walked), "or be left to the run"
    assert [d.split()[0] for d in config.differences(measured, walked)] == ["chain"]
    assert [d.split()[0] for d in measured.differences(config, config.chain)] == ["auto_gz"]


def test_the_state_of_an_old_run_is_refused_in_one_sentence(tmp_path):
    tensors = {"ema/a": torch.zeros(1), "weight/a": torch.zeros(1), "adam/generator/0/step": torch.zeros(())}
    facts = {"done": 2, "skipped": 0, "chain": OLD_CONFIG["chain"], "meter": {}}
    meta = {"state": json.dumps(facts), "config": json.dumps(OLD_CONFIG), "version": "1", "saved": "0"}
    save_file(tensors | {"random": torch.Generator().get_state()}, tmp_path / "state.safetensors", meta)
    with pytest.raises(VitrineError, match="does not say what it was begun with.*start again"):
        trainer(tmp_path)
