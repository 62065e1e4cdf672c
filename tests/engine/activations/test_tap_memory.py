"""What a tap holds in memory beyond the bare forward, on full-size SD1.5 and SDXL without weights (meta tensors)."""

import pytest
import torch
from vitrine.engine.activations import PRESETS
from vitrine.engine.runtime.footprint import Peak
from vitrine.engine.tracing.hooks import capture
from vitrine_tests import models
from vitrine_tests.lanes import nightly_but


def network(family):
    with torch.device("meta"):
        if family == "SDXL":
            net = models.outline(**models.SDXL)
            x, text = torch.randn(1, 4, 128, 128), torch.randn(1, 77, 2048)
            added = {"text_embeds": torch.randn(1, 1280), "time_ids": torch.randn(1, 6)}
        else:
            net = models.outline(**models.SD15)
            x, text, added = torch.randn(1, 4, 64, 64), torch.randn(1, 77, 768), None
        t = torch.tensor(51)
    return net.eval(), lambda: net(x, t, encoder_hidden_states=text, added_cond_kwargs=added)


@pytest.mark.parametrize(
    ("family", "name"),
    nightly_but([("SD 1.5", "Ours-v1.5"), ("SDXL", "Ours-XL"), ("SD 1.5", "DHF")], [("SD 1.5", "Ours-v1.5")]),
)
def test_a_tap_needs_at_most_a_third_more_than_what_it_hands_over(family, name):
    net, call = network(family)
    with torch.no_grad(), Peak() as bare:
        call()
    with torch.no_grad(), Peak() as tapped, capture(net, list(PRESETS[name].addresses)) as taps:
        call()
    wanted = sum(a.tensor.untyped_storage().nbytes() for a in taps.activations.values())
    assert len(taps.activations) == len(PRESETS[name].addresses) and wanted > 2**20
    assert tapped.peak - bare.peak <= 1.3 * wanted
