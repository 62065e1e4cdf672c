"""A stranger's model of digits by docs/add_a_family.md: read, sampled, tapped and blocked by methods as they are."""

import pytest
import torch
from torch import nn
from vitrine.engine import families
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.nemo import NeuronSet, block
from vitrine.engine.network.condition import Condition
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture
from vitrine_tests.published.digits import SAMPLES, accuracy, denoiser_of, judge, published_state, sampled
from vitrine_tests.published.mnist_family import FAMILY, WIDTH, Block, DigitTransformer, digits, from_state
from vitrine_tests.published.test_published import compared


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, FAMILY))


@pytest.fixture(scope="module")
def state():
    return published_state()


def blocked(net):
    values = {a: tuple(range(WIDTH)) for a in sites_of(net) if a.endswith("-ctx-v")}
    assert len(values) == 4
    return block(net, NeuronSet(values))


def test_every_weight_has_its_place_and_the_network_is_the_authors(state):
    net = from_state(state)
    assert sum(v.numel() for v in net.state_dict().values()) == sum(v.numel() for v in state.values())
    theirs = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, activation="gelu", batch_first=True).eval()
    theirs.load_state_dict({k.removeprefix("transformer.0."): v for k, v in state.items() if "transformer.0." in k})
    x = torch.randn(3, 20, WIDTH)
    with torch.no_grad():
        assert torch.allclose(net.blocks[0](x), theirs(x), atol=1e-5)


def test_a_tap_a_map_and_a_block_are_those_of_other_families(state):
    net = from_state(state)
    denoiser, x = denoiser_of(net), seeded_noise([1, 2], (1, 28, 28))
    addresses = [a for a in sites_of(net) if a.startswith("vit-block1-")]
    with torch.no_grad(), capture(net, addresses) as taps:
        bare = denoiser.forward(x, 600.0, digits([3, 7]))
    shown = taps["vit-block1-map"].tensor
    assert shown.shape[-2:] == (16, 20) and torch.allclose(shown.sum(-1), torch.ones(2, 4, 16), atol=1e-5)
    assert taps["vit-block1-out"].tensor.shape[0] == 2
    with torch.no_grad(), blocked(net):
        assert float((denoiser.forward(x, 600.0, digits([3, 7])) - bare).abs().mean()) > 1e-3
    with torch.no_grad():
        assert torch.equal(denoiser.forward(x, 600.0, digits([3, 7])), bare)


def test_digits_are_of_their_class_until_the_values_of_the_class_are_blocked(state):
    net, own = from_state(state), judge()[1]
    figures = {"outcome": "sampled", "samples": SAMPLES, "judge": round(own, 4), "sampled": accuracy(sampled(net))}
    with blocked(net):
        figures["values of time and class blocked"] = accuracy(sampled(net))
    assert own > 0.95 and figures["sampled"] > 0.85 and figures["values of time and class blocked"] < 0.3
    compared("digits, class accuracy", figures)


def test_a_class_needs_no_text_and_a_flow_may_predict_the_picture():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = DigitTransformer(1).eval()
    assert isinstance(net.blocks[0], Block)
    cond = digits([1, 2, 3])
    assert cond.count == 3 and cond.take(torch.tensor([2])).count == 1 and Condition().count == 1
    x, schedule = seeded_noise([1, 2, 3], (1, 28, 28)), NoiseSchedule.flow()
    clean = Denoiser(net, schedule, "x0", lambda x, t, cond: net(x, 1 - t / 1000, cond.extra["y"]))
    with torch.no_grad():
        ours, theirs = clean.predict(x, 400.0, cond), denoiser_of(net).predict(x, 400.0, cond)
    assert float(ours.x0.std()) > 0.01, "it predicts something"
    assert torch.allclose(ours.x0, theirs.x0, atol=1e-5) and torch.allclose(ours.eps, theirs.eps, atol=1e-4)
