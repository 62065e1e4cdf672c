"""Cost of the search against the published procedure, on 32 memorized captions, and of blocking against a bare forward.

The published procedure takes most of the time, 15 seconds a prompt; VITRINE_BENCH_PROMPTS=8 takes every fourth.
"""

import os

import pytest
import torch
from vitrine.engine.nemo.block import block_rows
from vitrine.engine.nemo.find import make_probe
from vitrine.engine.nemo.noise_similarity import min_max, probe_noise
from vitrine.engine.nemo.search import candidates
from vitrine.engine.nemo.sites import value_activations, value_sites
from vitrine.engine.portraits import plants
from vitrine.evidence.nemo.probed_model import SEARCH, SHAPE, setting


class Published:
    """The authors' procedure: one set of neurons a call, ten seeds a call, every call made twice (t 981 and 961)."""

    def __init__(self, probed, probe, cond):
        self.probed, self.probe, self.cond, self.calls = probed, probe, cond, 0
        self.noise = probe_noise(SEARCH, SHAPE)
        self.addresses = [s.address for s in probe.sites]
        self.plain = self.difference({})
        per_seed = probe.per_seed(self.plain)
        self.keep = per_seed > probed.tau

    @torch.no_grad()
    def difference(self, blocked):
        d = self.noise
        for t in (981.0, self.probe.t):
            self.calls += 1
            cond = self.cond.take(torch.zeros(len(self.noise), dtype=torch.long))
            with block_rows(self.probed.denoiser.backbone, self.probe.sites, [blocked] * len(self.noise)):
                d = min_max(self.probed.denoiser.predict(self.noise, t, cond).eps - self.noise)
        return d

    def score(self, blocked):
        return float(self.probe.similarity(self.plain[self.keep], self.difference(blocked)[self.keep]).max())

    def run(self):
        if not self.keep.any():
            return {}
        level = self.probed.tau
        a = [v.mean(0) for v in value_activations(self.probed.denoiser, self.cond, self.probe.sites)]
        z = [self.probed.statistics.z(ad, v) for ad, v in zip(self.addresses, a, strict=True)]
        theta, k = 5.0, 0
        while True:
            lists = candidates(self.addresses, z, a, theta, k)
            score = self.score(lists)
            if score <= level:
                break
            theta, k = theta - 0.25, k + 1
            if theta == 1:
                level = score
                break
        for layer in reversed(self.addresses):
            if lists[layer]:
                trial = lists | {layer: []}
                lists = trial if self.score(trial) < level else lists
        for layer in reversed(self.addresses):
            for position in range(len(lists[layer])):
                holes = [None if i == position else n for i, n in enumerate(lists[layer])]
                trial = lists | {layer: holes}
                plain = {ad: [n for n in ns if n is not None] for ad, ns in trial.items()}
                lists = trial if self.score(plain) < level else lists
        return {ad: sorted({n for n in ns if n is not None}) for ad, ns in lists.items()}


def test_lockstep_of_32_prompts_against_the_published_procedure(bench):
    bench.portraits()
    probed, found = setting(), {}
    verbatim = [p.captions[0] for p in plants() if p.kind == "verbatim"]
    templates = [c for p in plants() if p.kind == "template" for c in p.captions[:120:20]]
    prompts = [*verbatim, *templates]
    assert len(prompts) == 32
    count = 2 if bench.tiny else int(os.environ.get("VITRINE_BENCH_PROMPTS", "32"))
    prompts = prompts[:: 32 // count]
    probed.find(prompts[:1], protocol="nemo")  # warm
    probe = make_probe(probed.denoiser, config=SEARCH)

    def published():
        found["runs"] = [Published(probed, probe, c) for c in probed.conditions(prompts)]
        found["theirs"] = [r.run() for r in found["runs"]]

    def lockstep():
        found["ours"] = probed.find(prompts, protocol="nemo")

    method = f"NEMO search, {len(prompts)} prompts"
    row = bench.compare(method, "portraits", lockstep, {"published search": published}, 1, 0)["published search"]
    same = 0
    for result, theirs in zip(found["ours"], found["theirs"], strict=True):
        mine = {a: sorted(n) for a, n in result.search.neurons.items()} if result.search else {}
        same += mine == {a: n for a, n in theirs.items() if n}
    rows = [float(sum(r.forwards for r in found["ours"]))]
    theirs = [float(sum(r.calls for r in found["runs"]) * SEARCH.seeds)]
    bench.record(method, "published search", "portraits", rows, theirs, unit="network rows")
    bench.say(f"{sum(r.search is not None for r in found['ours'])} memorized, {same} equal sets")
    assert same >= len(prompts) - 2, "near ties of float32 may decide differently, but not often"
    if count == 32:  # with fewer, the batches that prompts share are not full
        bench.at_most("time", row.ratio, 1 / 5)


@pytest.mark.parametrize("model", ["portraits", "SD1.5"])
def test_rows_with_different_neurons_cost_a_bare_batch(bench, model):
    """What one look of the search costs, wherever it is run: each row has neurons of its own blocked."""
    full = bench.model(model, 40 if model == "portraits" else 4, 32)
    sites = value_sites(full.net)
    blocked = [{s.address: range(i % 24, i % 24 + 8) for s in sites} for i in range(len(full.x))]

    def ours():
        with block_rows(full.net, sites, blocked):
            full()

    bench.compare("NEMO, neurons of its own blocked in each row", full.label, ours, {"bare forward": full}, 3)
