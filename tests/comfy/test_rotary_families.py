"""Rotary positions at another size, every family in both libraries; the table of families is written from here."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.resolution import Applied, ModelFacts, Positions, ResolutionTransferConfig, facts_of, plan_transfer
from vitrine.engine.resolution.rope import ROPE_MODES
from vitrine.engine.resolution.rotary_patch import RotaryPositions
from vitrine_tests.comfy import rotary_runs
from vitrine_tests.families.twin import EqualEpsilon, comfyui_model, comfyui_twin, conditioning, inputs, network

pytestmark = pytest.mark.nightly

FAMILIES = {
    "flux": "Flux.1",
    "flux2": "Flux.2",
    "qwen_image": "Qwen-Image",
    "z_image": "Z-Image",
    "lumina2": "Lumina 2",
    "chroma": "Chroma",
    "krea2": "Krea 2",
    "anima": "Anima",
    "wan": "Wan",
    "hidream": "HiDream",
}
SIZES = {"hidream": (12, 12)}
"""Latents (h, w) where a twin's own have no half and third in whole tokens."""
LIMIT = 1e-5
PAGE = Path(__file__).parents[2] / "docs" / "any_size.md"
measured, shifts, untouched, runs = {}, {}, {}, {}


class Parts:
    """What a transfer takes of a diffusers pipeline: a network and a scheduler."""

    def __init__(self, transformer):
        self.transformer, self.scheduler = transformer, FlowMatchEulerDiscreteScheduler(shift=3.0)


class Family:
    """Both networks, a prompt, and a training size that is smaller by another ratio on each axis."""

    def __init__(self, name, net=None):
        from vitrine.nodes.comfy.conditioning import condition_of

        self.name, self.net = name, network(name) if net is None else net
        self.model = comfyui_model(name, comfyui_twin(name, self.net))
        self.x, self.t, cond = inputs(name, 1)
        self.source = cond
        if name in SIZES:
            self.x = torch.randn(*self.x.shape[:-2], *SIZES[name], generator=torch.Generator().manual_seed(5))
        format = self.model.get_model_object("latent_format")
        self.latents = self.x[:, :, None] if format.latent_dimensions == 3 and self.x.ndim == 4 else self.x
        with torch.inference_mode():
            self.told = condition_of(self.model, conditioning(name, cond), self.latents)
        text = self.told.text if name == "flux2" else cond.text
        self.cond = type(cond)(text.clone(), cond.pooled, cond.extra)
        self.denoiser = Denoiser.from_diffusers(self.net, FlowMatchEulerDiscreteScheduler())
        factor = format.spacial_downscale_ratio
        self.rows, self.columns = (side * factor for side in self.x.shape[-2:])
        self.train = (self.columns // 3, self.rows // 2)

    def facts(self):
        return ModelFacts(self.name, NoiseSchedule.flow(), self.train, 8, 2, positions=Positions("rope"))

    def plan(self, mode, target=None, train=None):
        target = target or (self.columns, self.rows)
        return plan_transfer(self.facts(), ResolutionTransferConfig(target, train, pos_embed=mode))

    def ours(self, t=None):
        with torch.no_grad(), EqualEpsilon(self.name, self.net):
            return self.denoiser.predict(self.x, self.t if t is None else t, self.cond)[1]

    def placed(self, plan, t=None):
        with RotaryPositions(self.net, plan):
            return self.ours(t)

    def theirs(self, model, t=None):
        from vitrine.nodes.comfy.model import denoiser_of

        with torch.inference_mode():
            found = denoiser_of(model).predict(self.latents, self.t if t is None else t, self.told)[1]
        return found.reshape(self.x.shape)

    def transferred(self, comfy, mode, model=None, train=None, **more):
        told = {"schedule": "none", "guidance_law": False, "guidance": 1.0, "override": False, "pos_embed": mode} | more
        told |= dict(zip(("train_width", "train_height"), train or self.train, strict=True))
        told |= {"target_width": self.columns, "target_height": self.rows}
        return comfy.call("VitrineResolutionTransferLoader", model=model or self.model, **told)


@pytest.fixture(scope="module", params=FAMILIES)
def family(comfy, request):
    with torch.no_grad():
        return Family(request.param)


def drift(a, b):
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("mode", ROPE_MODES)
def test_both_libraries_agree_and_something_changes(comfy, family, mode):
    t = 300.0 if mode.endswith("_dynamic") else family.t
    before, plan = family.ours(t), family.plan(mode)
    model, _, report = family.transferred(comfy, mode)
    ours, theirs = family.placed(plan, t), family.theirs(model, t)
    agree, change = drift(theirs, ours), drift(ours, before)
    assert agree <= LIMIT, ("one picture through both doors", agree, change)
    assert change > 5 * LIMIT, ("a mode that changes nothing", change)
    assert ("patent pending" in report) == mode.endswith("_dynamic")
    assert torch.equal(family.ours(t), before), "and it is gone"
    measured[family.name, mode] = agree, change


def test_nothing_changes_at_the_trained_size(comfy, family):
    size, pipe = (family.columns, family.rows), Parts(family.net)
    scheduler, before, theirs = pipe.scheduler, family.ours(), family.theirs(family.model)
    with Applied(pipe, family.plan("rope_pi"), family.facts()):
        assert pipe.scheduler is not scheduler and drift(family.ours(), before) > 5 * LIMIT, "the block does act"
    for mode in ROPE_MODES:
        with Applied(pipe, family.plan(mode, size, size), family.facts()):
            assert pipe.scheduler is scheduler and torch.equal(family.ours(), before)
        model, _, report = family.transferred(comfy, mode, train=size, schedule="resample")
        assert not model.object_patches and "nothing is changed" in report
        assert torch.equal(family.theirs(model), theirs)
    untouched[family.name] = True


def test_each_axis_has_its_own_scale(family):
    """A picture that is only wider, only higher, or both, gives three results: non-square does something."""
    width, height = family.train
    sizes = (width, family.rows), (family.columns, height), family.train
    found = [family.placed(family.plan("rope_pi", train=train)) for train in sizes]
    for k in range(3):
        assert drift(found[k], found[k - 1]) > 5 * LIMIT


@pytest.mark.parametrize("mode", ["rope_pi_dynamic", "rope_ntk_dynamic"])
def test_trained_positions_come_back_as_the_noise_falls(family, mode):
    far, near = (drift(family.placed(family.plan(mode), t), family.ours(t)) for t in (900.0, 1e-3))
    assert near < LIMIT < far


def test_shift_and_its_composition(comfy, family):
    """The shift of a flow becomes r times the model's own."""
    from vitrine.nodes.comfy.schedule import own_shift

    model, _, report = family.transferred(comfy, "auto", schedule="resample")
    old, new = (own_shift(m.get_model_object("model_sampling")) for m in (family.model, model))
    pipe = Parts(family.net)
    with Applied(pipe, family.plan("rope_pi"), family.facts()):
        pipe.scheduler.set_timesteps(4)
        ours = pipe.scheduler.sigmas[:-1].double()
    levels = pipe.scheduler
    levels.set_timesteps(4)
    plain = levels.sigmas[:-1].double()
    times = float(((ours / (1 - ours)) / (plain / (1 - plain)))[1:].mean())
    assert new == pytest.approx(old * 6**0.5) and f"{new:.4g}" in report
    assert times == pytest.approx(6**0.5, rel=1e-5), "diffusers' steps have the same odds of noise, r times the old"
    shifts[family.name] = new / old, times
    assert "in short" in report.splitlines()[0] and "unchanged: the weights" in report


def drifts(comfy, family, pipe, mode):
    """(moved, moved with the pipeline's own levels, change): whole runs of two steps, non-square."""
    from vitrine.engine.pipelines import ResolutionTransferPipeline

    size = family.columns, family.rows
    wide = ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig(size, family.train, pos_embed=mode))
    moved, _, report = family.transferred(comfy, mode, schedule="resample")
    assert wide.plan.lines[0] == report.splitlines()[0]
    (ours, levels), (plain, _) = (rotary_runs.ours(family, p, p is pipe) for p in (wide, pipe))
    theirs = [rotary_runs.theirs(family, moved, given) for given in (None, levels)]
    return drift(theirs[0], ours), drift(theirs[1], ours), drift(ours, plain)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "hidream"])
def test_a_whole_run_is_one_picture_through_both_doors(comfy, name):
    """Core's sampler and the stock pipeline, each with what this pack puts into it; nothing moved agrees first."""
    with torch.no_grad():
        family = Family(name, rotary_runs.calmed(network(name)))
        pipe = rotary_runs.stock(family)
        untouched = drift(rotary_runs.theirs(family, family.model), rotary_runs.ours(family, pipe, True)[0])
        found = [drifts(comfy, family, pipe, mode) for mode in ("rope_pi", "rope_yarn_dynamic")]
    assert untouched <= LIMIT
    for own, given, change in found:
        assert given <= LIMIT < 0.03 < change, (own, given, change)
        assert (own <= LIMIT) == (name not in rotary_runs.OWN_END), own
    runs[name] = max(own for own, _, _ in found)


def test_a_modular_pipeline_is_told_what_it_does_not_know(comfy):
    """diffusers has Anima as blocks only: they swallow every argument, guidance too, which is their guider's."""
    from vitrine.engine.pipelines import ResolutionTransferPipeline

    family = Family("anima")
    config = ResolutionTransferConfig((family.columns, family.rows), family.train)
    with pytest.raises(VitrineError, match="prompt_embed; accepted.* prompt_embeds"):
        ResolutionTransferPipeline.from_pipe(rotary_runs.stock(family), config)(prompt_embed=family.cond.text)
    guided = replace(config, guidance=2.0, guidance_law=True)
    with pytest.raises(VitrineError, match="guider"):
        ResolutionTransferPipeline.from_pipe(rotary_runs.stock(family), guided)(prompt_embeds=family.cond.text)


def test_hidreams_pipeline_is_refused():
    pipe = Parts(network("hidream"))
    with pytest.raises(VitrineError, match="generates at one area"):
        facts_of(pipe)


def test_a_second_loader_is_refused(comfy, family):
    """Positions of EmbedND would be scaled once more, others are no longer known: plainly no, for all alike."""
    for first in ({"mode": "rope_pi"}, {"mode": "keep", "schedule": "resample"}):
        moved = family.transferred(comfy, **first)[0]
        with pytest.raises(VitrineError, match="already"):
            family.transferred(comfy, "auto", model=moved)
        with pytest.raises(VitrineError, match="already"):
            family.transferred(comfy, "auto", model=moved.clone())
    size = family.columns, family.rows
    unmoved = family.transferred(comfy, "auto", train=size)[0]
    family.transferred(comfy, "rope_pi", model=unmoved)


def test_scale_rope_is_refused_before_and_behind(comfy, family):
    from comfy.samplers import CFGGuider
    from comfy_extras.nodes_rope import ScaleROPE
    from vitrine.nodes.comfy.forwards import Run
    from vitrine.nodes.comfy.resolution import _alone

    half = {"scale_x": 0.5, "shift_x": 0.0, "scale_y": 0.5, "shift_y": 0.0, "scale_t": 1.0, "shift_t": 0.0}
    scaled = ScaleROPE.execute(family.model, **half).result[0]
    with pytest.raises(VitrineError, match="ScaleROPE"):
        family.transferred(comfy, "rope_pi", model=scaled)
    assert family.transferred(comfy, "keep", model=scaled)[0].model_options["transformer_options"]["rope_options"]
    behind = ScaleROPE.execute(family.transferred(comfy, "rope_pi")[0], **half).result[0]
    guider = CFGGuider(behind)  # what KSampler makes around a MODEL
    with pytest.raises(VitrineError, match="ScaleROPE"), _alone(Run(guider, family.x, torch.ones(2))):
        pass


def whole_run(name):
    """What the table says of it."""
    if name == "hidream":
        return "its pipeline is refused"
    if name in rotary_runs.OWN_END:
        return f"✓ at its pipeline's levels; {runs[name]:.0%} apart at core's own"
    return "✓" if runs[name] <= LIMIT else "✗"


def test_the_table_is_written():
    """One row a family: agreement of the doors / size of the change, largest over each kind of mode."""
    if len(measured) < len(FAMILIES) * len(ROPE_MODES) or len(shifts) < len(FAMILIES) > len(runs) + 1:
        pytest.skip("runs with the whole file")
    rows = []
    for name, title in FAMILIES.items():
        cells = []
        for dynamic in (False, True):
            pairs = [v for (n, m), v in measured.items() if n == name and m.endswith("_dynamic") == dynamic]
            cells.append("✓" if all(a <= LIMIT < c for a, c in pairs) else "✗")
        alike = all(abs(t / 6**0.5 - 1) < LIMIT for t in shifts[name])
        cells += ["r x its own" if alike else "✗", "bit for bit" if untouched.get(name) else "✗"]
        cells.append(whole_run(name))
        rows.append(f"| {title} | {' | '.join(cells)} |")
    columns = "family", "static (PI, NTK, YaRN)", "timestep-dependent", "shift", "at the trained size", "whole run"
    table = "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])
    start, end = "<!-- table -->", "<!-- end of table -->"
    page = PAGE.read_text(encoding="utf-8")
    new = f"{page.partition(start)[0]}{start}\n{table}\n{end}{page.partition(end)[2]}"
    if os.environ.get("VITRINE_WRITE_DOCS"):
        PAGE.write_text(new, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == new, "VITRINE_WRITE_DOCS=1 writes it"
