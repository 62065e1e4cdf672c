"""Whether blocking works: on other seeds, and under an embedding that was optimised to bring the picture back.

Blocking stops recall for a prompt. It does not take the picture out of the weights, and an attacker who can choose the
embedding freely often gets it back (DoRI). So the verdict states both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..network.condition import Condition
from ..network.light_gradients import computed_again, copies_its_weights, parts_of
from ..runtime.finite import FiniteLosses, require_finite
from ..runtime.placement import onloaded
from ..runtime.progress import Progress, silent
from ..settings.nemo_options import Tau, check_tau
from ..settings.one_line import one_line
from ..settings.option import Option, Options
from ..settings.verdicts import BAD, OPEN, verdict_of
from ..tracing.fingerprint import fingerprint_of
from .block import block
from .neurons import NeuronSet
from .noise_similarity import Probe, Request, Score, probe_noise


@dataclass(frozen=True)
class AttackConfig(Options):
    """The adversarial embedding: Adam on the text states against the denoising loss of one picture.

    The defaults are DoRI's; pictures a model never memorized need over 500 steps.
    """

    steps: Annotated[int, Option("Adam steps; 50 is a fair probe.", ge=0, top=1000)] = 50
    lr: Annotated[float, Option("Learning rate.", gt=0)] = 0.1
    batch: Annotated[int, Option("Noise levels in each step.", ge=1)] = 8
    seed: Annotated[int, Option("Of the noises and timesteps.")] = 0


ATTACK = AttackConfig()


@dataclass(frozen=True)
class VerifyConfig(Options):
    """How blocking is verified. Without a threshold there is no verdict."""

    tau: Tau
    seed: Annotated[int, Option("Of the noises; the search uses 1.", ge=0, top=2**31)] = 101
    attack: AttackConfig = field(default=ATTACK)


@one_line
@dataclass(frozen=True)
class Verification:
    """Cross-seed scores on seeds the search never saw, each with its tau.

    Attributes:
        untouched, blocked: without and with the neurons blocked.
        attacked: blocked, under the adversarial embedding; None without a reference.
        embedding: that embedding (one row), to sample with and look.
    """

    untouched: Score
    blocked: Score
    attacked: Score | None = None
    embedding: Condition | None = None

    @property
    def rated(self) -> tuple[str, str]:
        """Of the two checks, other seeds and the attack, in the words of :mod:`vitrine.engine.settings.verdicts`."""
        seeds = self.blocked.rated if self.untouched.rated == BAD else OPEN
        return seeds, OPEN if self.attacked is None else self.attacked.rated

    @property
    def verdict(self) -> str:
        """``fine`` only if the untouched model reproduces the picture, and neither other seeds nor the attack do."""
        return verdict_of(self.rated, "checks")

    def text(self) -> str:
        """The verdict and how much was measured, then one finding a line."""
        untouched, blocked = self.untouched.value, self.blocked.value
        lines = [
            f"{self.verdict}, {len(self.blocked.per_seed)} seeds each",
            f"other seeds agree by {untouched:.3f} untouched, {blocked:.3f} blocked (tau {self.blocked.tau:.3f})",
        ]
        if not self.untouched.memorized:
            lines.append("this prompt is not memorized on these seeds: nothing to verify")
        elif self.blocked.memorized:
            lines.append("NOT enough: other seeds still agree; search with a higher effect_fraction or a wider scope")
        else:
            lines.append("other seeds no longer agree: sample pictures to see whether any is still a copy")
        if self.attacked is not None:
            fate = "comes back" if self.attacked.memorized else "does not come back"
            lines.append(f"under an optimised embedding the picture {fate} ({self.attacked.value:.3f})")
        else:
            lines.append("no reference picture: the adversarial embedding was not tried")
        lines.append("blocking stops recall for this prompt; it does not erase the picture from the model")
        return "\n".join(lines)


@torch.no_grad()
def _score(probe: Probe, cond: Condition, shape: tuple[int, int, int], tau: float | None) -> Score:
    """The cross-seed score of the network as it is at the moment, at the probe's own seeds."""
    noise = probe_noise(probe.config, shape).to(cond.text.device if cond.text is not None else "cpu")
    (signals,) = probe.signals([Request(cond, noise, {})])
    return Score(probe.per_seed(signals).cpu(), tau, probe.metric(shape))


def adversarial_embedding(
    denoiser: Denoiser,
    cond: Condition,
    reference: torch.Tensor,
    neurons: NeuronSet,
    config: AttackConfig = ATTACK,
    *,
    fingerprint: str = "",
    progress: Progress = silent,
) -> Condition:
    """Text states that denoise ``reference`` best while the neurons are blocked (DoRI, arXiv 2507.16880).

    Args:
        cond: one prompt, where the optimisation starts.
        reference: (1, C, h, w) latents of the picture that must not come back.
        fingerprint: see :func:`vitrine.engine.nemo.block`.
    """
    if cond.text is None or len(cond.text) != 1 or len(reference) != 1:
        shown = (None if cond.text is None else len(cond.text), len(reference))
        raise refuse("condition and reference", shown, "one each", "verify one prompt and picture at a time")
    with onloaded(denoiser.backbone), block(denoiser.backbone, neurons, fingerprint=fingerprint):
        text = optimised_text(denoiser, cond, reference, config, progress)
    return replace(cond, text=text.to(cond.text.dtype))


def optimised_text(
    denoiser: Denoiser, cond: Condition, reference: torch.Tensor, config: AttackConfig, progress: Progress = silent
) -> torch.Tensor:
    """(1, T, D) float32 text states that denoise ``reference``, (1, C, h, w), best with the current network.

    Where weights are kept in half precision or elsewhere, the network is computed a second time in the backward pass:
    the copies that layers make of their weights would otherwise all be kept.
    """
    assert cond.text is not None
    text = cond.text.detach().float().clone().requires_grad_(True)
    optimizer = torch.optim.Adam([text], lr=config.lr)
    g = torch.Generator().manual_seed(config.seed)
    rows = torch.zeros(config.batch, dtype=torch.long)
    clean = reference.float().repeat_interleave(config.batch, 0)

    def output(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return denoiser.forward(x, t, replace(cond, text=text).take(rows))

    losses = FiniteLosses("loss of the adversarial embedding")
    parts: list[torch.nn.Module] = []
    if copies_its_weights(denoiser.backbone, clean.device):
        parts = parts_of(denoiser.backbone, lambda: output(clean, torch.zeros(len(clean), device=clean.device)))
    with torch.enable_grad(), computed_again(parts):
        for step in range(config.steps):
            noise = torch.randn(clean.shape, generator=g).to(clean)
            t = torch.randint(denoiser.schedule.steps, (len(clean),), generator=g).float().to(clean.device)
            x_t = denoiser.network_input(clean, noise, t)
            seen = output(x_t, t)
            # Ho et al. 2020, Eq. 14, of what the network learned to put out: v and flow models make next to no error
            # in eps at high noise
            loss = denoiser.error(seen, x_t, clean, noise, t).square().mean()
            losses.see(loss)
            (text.grad,) = torch.autograd.grad(loss, text)
            optimizer.step()
            least = int(t.argmin())  # the least noised row says most about the picture
            row = slice(least, least + 1)
            progress(step + 1, config.steps, denoiser.split(seen[row].detach(), x_t[row], t[row]).x0)
    require_finite(text, "adversarial embedding")
    return text.detach()


def verify(
    probe: Probe,
    cond: Condition,
    neurons: NeuronSet,
    shape: tuple[int, int, int],
    config: VerifyConfig,
    *,
    reference: torch.Tensor | None = None,
    fingerprint: str = "",
    progress: Progress = silent,
) -> Verification:
    """Score blocked neurons on seeds the search never saw and, with a reference, under an adversarial embedding.

    Args:
        probe: as in the search, but for its seeds.
        cond: the prompt, one row.
        shape: (C, h, w) of the latents.
        reference: (1, C, h, w) latents of the memorized picture, or of an unblocked sample.
        fingerprint: of the model, where its modules carry patches at the moment.
    """
    check_tau(config.tau)
    fresh = replace(probe, config=replace(probe.config, seed=config.seed))
    fingerprint = fingerprint or fingerprint_of(probe.denoiser.backbone)  # once: each is read from the device
    neurons.check(probe.denoiser.backbone, probe.sites, fingerprint)
    untouched = _score(fresh, cond, shape, config.tau)
    with block(probe.denoiser.backbone, neurons, fingerprint=fingerprint):
        blocked = _score(fresh, cond, shape, config.tau)
    if reference is None:
        return Verification(untouched, blocked)
    embedding = adversarial_embedding(
        probe.denoiser, cond, reference, neurons, config.attack, fingerprint=fingerprint, progress=progress
    )
    with block(probe.denoiser.backbone, neurons, fingerprint=fingerprint):
        attacked = _score(fresh, embedding, shape, config.tau)
    return Verification(untouched, blocked, attacked, embedding)
