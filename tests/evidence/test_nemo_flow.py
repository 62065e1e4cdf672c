"""NEMO on the flow model: halves of the memorized pictures, statistics where values depend on the latent."""

import torch
from vitrine.engine.portraits.flow import FLOW_WEIGHTS
from vitrine.engine.settings.nemo_options import ProbeConfig
from vitrine.evidence.nemo import flow_claims
from vitrine.evidence.nemo.probed_model import SampleBudget, setting


def test_what_chooses_does_not_measure():
    choosing, measuring = flow_claims.halves()
    assert [[p.kind for p in half].count("verbatim") for half in (choosing, measuring)] == [4, 4]
    assert not {p.name for p in choosing} & {p.name for p in measuring} and len(choosing + measuring) == 12


def test_statistics_of_the_flow_model():
    probe = ProbeConfig(seeds=2, timestep_index=15, signal="x0")
    probed = setting(str(FLOW_WEIGHTS), budget=SampleBudget(statistics=6, calibration=3), search=probe)
    assert list(probed.widths().values()) == [160] * 6 and 0 < probed.tau < 1
    activations = {f"vit-block{i}-ctx-v": torch.ones(160) for i in range(6)}
    assert all(bool(torch.isfinite(probed.statistics.z(a, v)).all()) for a, v in activations.items())
