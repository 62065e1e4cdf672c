"""NEMO on the flow model: halves of the memorized pictures, statistics where values depend on the latent, the score."""

import torch
from vitrine.engine.nemo.search_config import ProbeConfig
from vitrine.engine.portraits.flow import FLOW_WEIGHTS
from vitrine.evidence.nemo import flow_claims
from vitrine.evidence.nemo.probed_model import ORDINARY, SampleBudget, captions, setting


def test_what_chooses_does_not_measure():
    choosing, measuring = flow_claims.halves()
    assert [[p.kind for p in half].count("verbatim") for half in (choosing, measuring)] == [4, 4]
    assert not {p.name for p in choosing} & {p.name for p in measuring} and len(choosing + measuring) == 12
    texts, controls = (flow_claims._captions(measuring, 10, controls=c) for c in (False, True))
    assert len(texts) == len(controls) == 24
    assert all(t.startswith(c) and t != c for t, c in zip(texts, controls, strict=True))


def test_statistics_and_score_of_the_flow_model():
    probe = ProbeConfig(seeds=2, timestep_index=15, signal="x0", data_range=1.0)
    probed = setting(str(FLOW_WEIGHTS), budget=SampleBudget(statistics=6, calibration=3), search=probe)
    assert list(probed.widths().values()) == [160] * 6 and 0 < probed.tau < 1
    activations = {f"vit-block{i}-ctx-v": torch.ones(160) for i in range(6)}
    assert all(bool(torch.isfinite(probed.statistics.z(a, v)).all()) for a, v in activations.items())
    memorized = [p.captions[0] for p in flow_claims.halves()[1]][:2]
    high, low = (flow_claims._values(probed, texts, probe) for texts in (memorized, captions(ORDINARY, 4)))
    assert float(high.min()) > float(low.max())
