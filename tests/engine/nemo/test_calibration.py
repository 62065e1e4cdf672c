"""One file for all that is usual on a model: each part alone or with the others, and what is said without it."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import (
    PARTS,
    Calibration,
    FewStepConfig,
    NeuronStatistics,
    ProbeConfig,
    SampleThreshold,
    ScoreThreshold,
)
from vitrine.engine.nemo.calibration import threshold

MODEL, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def parts():
    rows = {"down-level0-cross-v": torch.rand(6) + 0.1}
    probe = ProbeConfig(seeds=4, timestep_index=15)
    return {
        "statistics": NeuronStatistics(rows, {a: v.clone() for a, v in rows.items()}, 12, MODEL),
        "samples": SampleThreshold(0.2, 0.5, torch.rand(64, 64), 10, FewStepConfig(steps=3), MODEL),
        "score": ScoreThreshold.of([0.3, 0.4, 0.5], probe, MODEL),
    }


@pytest.mark.parametrize("names", [PARTS, *((part,) for part in PARTS)], ids="+".join)
def test_parts_survive_the_file_and_a_missing_one_is_named(parts, tmp_path, names):
    made = Calibration(**{name: parts[name] for name in names})
    read = Calibration.load(made.save(tmp_path / "calibration.safetensors"))
    assert read.text() == made.text() and len(read.text().splitlines()) == len(names)
    for part in PARTS:
        if part not in names:
            with pytest.raises(VitrineError, match=f"calibration: given {names[0]} alone; accepted: one with {part}"):
                read.known(part)
    if "statistics" in names:
        known = read.known("statistics")
        assert all(torch.equal(known.means[a], v) for a, v in parts["statistics"].means.items())
        assert all(torch.equal(known.stds[a], v) for a, v in parts["statistics"].stds.items())
        assert (known.count, known.fingerprint, read.scope) == (12, MODEL, "down+mid")
    if "samples" in names:
        assert read.samples.config == parts["samples"].config and torch.equal(
            read.samples.places, parts["samples"].places
        )
    assert read.score == made.score


def test_it_is_of_one_model_and_its_tau_of_one_setting(parts):
    made = Calibration(**parts)
    assert made.check(MODEL) is made
    for part in ("samples", "score"):
        with pytest.raises(VitrineError, match="measured on this model"):
            Calibration(**{part: parts[part]}).check(OTHER)
    assert made.tau_at(ProbeConfig(seeds=4, timestep_index=15)) == parts["score"].tau
    assert made.tau_at(ProbeConfig(seeds=4, timestep_index=14)) is None and Calibration().tau_at(ProbeConfig()) is None


def test_threshold_is_mean_plus_one_deviation():
    tau, mean, std = threshold([0.3, 0.4, 0.5])
    assert (round(tau, 6), round(mean, 6), round(std, 6)) == (0.5, 0.4, 0.1)


def test_nothing_and_what_is_no_calibration_are_refused(tmp_path):
    with pytest.raises(VitrineError, match="without any part"):
        Calibration().save(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(VitrineError, match=r"bad\.safetensors"):
        Calibration.load(tmp_path / "bad.safetensors")
