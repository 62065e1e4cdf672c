"""A stranger's model of digits by docs/add_a_family.md: read, sampled, tapped and blocked by methods as they are."""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vitrine.engine import families
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.nemo import NeuronSet, block
from vitrine.engine.network.condition import Condition
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture
from vitrine_tests.published.mnist_family import (
    FAMILY,
    FILE,
    NO_CLASS,
    WIDTH,
    Block,
    DigitTransformer,
    digits,
    from_state,
)

FOLDER = Path(os.environ.get("VITRINE_PUBLISHED") or "none")
DIGITS = FOLDER / "ALTroot-user+try_DDPM"
RESULTS = Path(__file__).parent / "results" / "mnist_family.json"
SAMPLES = 400
published = pytest.mark.skipif(not (FOLDER / FILE).is_file(), reason=f"set VITRINE_PUBLISHED to a folder with {FILE}")
judged = pytest.mark.skipif(
    not (DIGITS / "t10k-images-idx3-ubyte.gz").is_file(),
    reason="MNIST's test set (of ALTroot-user/try_DDPM) is not there",
)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, FAMILY))


@pytest.fixture(scope="module")
def state():
    return torch.load(FOLDER / FILE, weights_only=True)


def denoiser_of(net):
    return Denoiser(net, NoiseSchedule.flow(), "flow", families.call_of(net))


@torch.no_grad()
def sampled(net, steps=25, guidance=2.0):
    """(labels, digits) of Euler steps; guidance in the middle of the way only, as the author's script."""
    labels = torch.arange(SAMPLES) % 10
    denoiser, x = denoiser_of(net), seeded_noise(list(range(SAMPLES)), (1, 28, 28))
    cond, none = digits(labels.tolist()), digits([NO_CLASS] * SAMPLES)
    for i in range(steps):
        s, after = 1 - i / steps, 1 - (i + 1) / steps
        v = denoiser.forward(x, 1000 * s, cond)
        if 0.3 < s < 0.7:
            bare = denoiser.forward(x, 1000 * s, none)
            v = bare + guidance * (v - bare)
        x = x + (after - s) * v
    return labels, x


def mnist():
    images = gzip.decompress((DIGITS / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((DIGITS / "t10k-labels-idx1-ubyte.gz").read_bytes())[8:]
    pixels = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(-1, 1, 28, 28).float() / 255
    return pixels, torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()


@pytest.fixture(scope="module")
def judge():
    """A small classifier of MNIST's test set, and its accuracy on the 2000 digits that it has not seen."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, 2, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1568, 10),
        )
        pixels, labels = mnist()
        optimizer = torch.optim.Adam(net.parameters(), 2e-3)
        for _ in range(4):
            for part in torch.randperm(8000).split(64):
                optimizer.zero_grad()
                F.cross_entropy(net(pixels[part]), labels[part]).backward()
                optimizer.step()
    with torch.no_grad():
        return net, float((net(pixels[8000:]).argmax(1) == labels[8000:]).float().mean())


def blocked(net):
    values = {a: tuple(range(WIDTH)) for a in sites_of(net) if a.endswith("-ctx-v")}
    assert len(values) == 4
    return block(net, NeuronSet(values))


@published
def test_every_weight_has_its_place_and_the_network_is_the_authors(state):
    net = from_state(state)
    assert sum(v.numel() for v in net.state_dict().values()) == sum(v.numel() for v in state.values())
    theirs = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, activation="gelu", batch_first=True).eval()
    theirs.load_state_dict({k.removeprefix("transformer.0."): v for k, v in state.items() if "transformer.0." in k})
    x = torch.randn(3, 20, WIDTH)
    with torch.no_grad():
        assert torch.allclose(net.blocks[0](x), theirs(x), atol=1e-5)


@published
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


@published
@judged
def test_digits_are_of_their_class_until_the_values_of_the_class_are_blocked(state, judge):
    net, (classifier, own) = from_state(state), judge
    figures = {"judge": round(own, 4)}
    for name, context in (("sampled", None), ("values of time and class blocked", blocked)):
        if context is None:
            labels, x = sampled(net)
        else:
            with context(net):
                labels, x = sampled(net)
        with torch.no_grad():
            figures[name] = round(float((classifier(x.clamp(0, 1)).argmax(1) == labels).float().mean()), 4)
    assert own > 0.95 and figures["sampled"] > 0.85 and figures["values of time and class blocked"] < 0.3
    if os.environ.get("VITRINE_WRITE_DOCS"):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"samples": SAMPLES, "class accuracy": figures}, indent=1) + "\n")
    assert json.loads(RESULTS.read_text())["class accuracy"].keys() == figures.keys()


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
