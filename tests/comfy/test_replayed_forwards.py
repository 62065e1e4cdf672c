"""Each user of hooks on a network that core records and replays block by block: right, or refused."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.runtime.forward_hooks import Unreached
from vitrine_tests.comfy.replaying import compiled
from vitrine_tests.lanes import nightly_but

ADDRESSES = "up-level1-repeat0-vit-block0-cross-q\nmid-vit-out"
STEPS = 5
MOVED = {
    "schedule": "resample",
    "pos_embed": "auto",
    "guidance_law": False,
    "guidance": 3.0,
    "override": False,
    "train_width": 0,
    "train_height": 0,
}


class Case:
    """A MODEL with one of our nodes on it, and a run of it.

    Attributes:
        plain: the MODEL without the node.
        run: () -> tensor.
    """

    def __init__(self, plain, run):
        self.plain, self.run = plain, run

    @property
    def network(self):
        return self.plain.model.diffusion_model

    @property
    def blocks(self):
        net = self.network
        if hasattr(net, "input_blocks"):
            return [layer for block in (*net.input_blocks, net.middle_block, *net.output_blocks) for layer in block]
        return [*net.double_blocks, *net.single_blocks] if hasattr(net, "double_blocks") else [*net.blocks]


@pytest.fixture(scope="module")
def cases(comfy, beside, tmp_path_factory):
    """Name -> function that makes a :class:`Case`."""
    scene = beside("hard").Scene(comfy, tmp_path_factory.mktemp("replayed"))
    call, model, long = comfy.call, scene.model, scene.runs()
    from comfy.sample import prepare_noise, sample

    flow, clip, _ = call("VitrineLoadPortraits", model="flow portraits, 128 px")

    def wide(model, clip, side, latent, field="none"):
        """A run at another size than the trained one, and the MODEL's own network."""
        told = MOVED | {"target_width": side, "target_height": side, "receptive_field": field}
        made = call("VitrineResolutionTransferLoader", model=model, **told)[0]
        with torch.inference_mode():
            texts = [clip.encode_from_tokens_scheduled(clip.tokenize(t)) for t in ("a smiling face", "")]
            noise = prepare_noise(latent, 5)
            told = (noise, STEPS, 2.0, "euler", "simple", *texts, latent)
            return sample(made, *told, disable_pbar=True, seed=5)

    def during():
        tapped, recorder = scene.tap(model)
        scene.ksampler(tapped, STEPS)
        record = recorder.record
        return torch.cat([a.tensor.flatten() for i in record for h in sorted(record[i]) for a in record[i][h].values()])

    def one_by_one():
        told = {"selection": "layers below", "layers": ADDRESSES, "timestep": 50.0, "seed": 0, "ensemble": 12}
        taps = call(
            "VitrineActivationTap",
            model=model,
            vae=scene.vae,
            positive=scene.positive,
            image=scene.pictures[0],
            dtype="float32",
            **told,
        )[0]
        return torch.cat([a.tensor.flatten() for a in taps.values()])

    def run(name):
        return lambda: torch.cat([t.detach().double().flatten() for t in long[name]()])

    return {name: Case(model, run(name)) for name in LONG} | {
        "tap": Case(model, one_by_one),
        "during": Case(model, during),
        "block": Case(model, lambda: scene.ksampler(scene.blocked, STEPS)),
        "late model": Case(model, lambda: scene.ksampler(scene.late, STEPS)),
        "control": Case(scene.told, scene.controlled),
        "receptive field": Case(model, lambda: wide(model, scene.clip, 128, torch.zeros(1, 4, 32, 32), "dilate")),
        "rotary": Case(flow, lambda: wide(flow, clip, 192, torch.zeros(1, 16, 24, 24))),
        "nothing": Case(model, lambda: scene.ksampler(model, STEPS)),
    }


LONG = (
    "Find Same Points",
    "Segment Like This",
    "Rank Layers",
    "Calibrate Copy Detection (NEMO)",
    "Calibrate Copy Detection (NEMO), score",
    "Detect a Copied Prompt (NEMO)",
    "Find Copying Neurons (NEMO)",
    "Verify Blocking (NEMO)",
    "One-Step Sampler (EMD)",
    "Person from Picture (W2W)",
)
"""Nodes whose forwards are not those of a sampler: some read values, some need gradients."""
NAMES = (
    "tap",
    "during",
    "block",
    "late model",
    "control",
    "receptive field",
    "rotary",
    *LONG,
)
NEVER = ("Verify Blocking (NEMO)", "Person from Picture (W2W)", "Calibrate Copy Detection (NEMO)")
"""Autograd stops a replay by an error of its own; of the statistics' forwards no block is replayed in three runs."""
DAILY = ("tap", "during", "block", "late model", "receptive field", "Verify Blocking (NEMO)")


def test_the_stand_in_replays(cases):
    case = cases["nothing"]
    wanted = case.run()
    with compiled(case.network, case.blocks) as core:
        found = case.run()
    assert core.replays > 10 and not core.rogues and not core.read
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("name", nightly_but(NAMES, DAILY))
def test_right_where_core_may_replay(cases, name):
    case = cases[name]
    wanted = case.run()
    with compiled(case.network, case.blocks) as core:
        found = case.run()
    assert torch.equal(found, wanted) if not core.replays else torch.allclose(found, wanted, atol=1e-5)
    assert not core.rogues, set(core.rogues)
    assert not core.read, core.read[0]


@pytest.mark.parametrize(
    "name", nightly_but([name for name in NAMES if name not in NEVER], ("during", "block", "rotary"))
)
def test_refused_or_right_where_core_replays_all_the_same(cases, name):
    case = cases[name]
    wanted = case.run()
    with compiled(case.network, case.blocks, stubborn=True) as core:
        for _ in range(3 if name in LONG else 1):  # a block is replayed from its third forward on
            try:
                found = case.run()
            except VitrineError as error:
                assert isinstance(error, Unreached) or "reached" in str(error)
                found = wanted
    assert core.replays and torch.allclose(found, wanted, atol=1e-5)
