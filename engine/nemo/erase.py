"""Erasing: weights trained until no embedding that was optimised to call a picture brings it back (DoRI's remedy).

Blocking stops recall for a prompt; the picture stays in the weights, and an optimised embedding finds it. So the
weights are trained against such embeddings: what called the picture must denoise a surrogate instead, a sample of the
blocked model with the same meaning and other pixels, while ordinary captions keep their predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..families import call_of
from ..io.files import save_safetensors
from ..io.lora_writing import kohya, of_peft
from ..io.number_checks import integer
from ..jobs.run import Run, run_steps
from ..jobs.training import learning_rate, set_rate
from ..network.condition import Condition
from ..runtime.finite import FiniteLosses
from ..runtime.placement import copied, dtype_of
from ..runtime.progress import Progress, silent
from ..settings.config import Config
from .blocking_checks import AttackConfig, optimised_text

STARTS = ("prompt", "random", "other")
KEEP = ("predictions", "noise")
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
"""Layers that a LoRA changes: attention and the feed-forward behind it."""


@dataclass(frozen=True)
class EraseConfig(Config):
    """The training; the outer optimiser, its rate and its batch are ours, the source's are not published.

    Attributes:
        rounds: attacks on the current weights; each adds one embedding for every picture.
        updates: of the weights after each attack.
        lr: Adam's highest rate; it falls to 0 along a cosine.
        batch: rows of each of the two losses in one update.
        rank: of a LoRA on attention and feed-forward layers; 0 trains all weights, as published.
        attack: each round's optimisation of the embeddings.
        starts: where attacks begin, in turn: at the ``prompt``, at a ``random`` Gaussian of the prompts' mean and
            deviation, or at an ``other`` (ordinary) caption.
        keep: what ordinary captions must go on predicting: the untouched network's ``predictions``, which costs a
            forward more and disturbs less, or the ``noise`` (published: the ordinary denoising loss).
        seed: of batches, noises and starts.
        save_every: updates between two saves of the state.
    """

    rounds: int = 10
    updates: int = 30
    lr: float = 3e-4
    batch: int = 16
    rank: int = 0
    attack: AttackConfig = field(default=AttackConfig(steps=30, batch=4))
    starts: tuple[str, ...] = STARTS
    keep: str = "predictions"
    seed: int = 0
    save_every: int = 30

    def __post_init__(self) -> None:
        counts = {"rounds": self.rounds, "updates": self.updates, "batch": self.batch, "save_every": self.save_every}
        if min(counts.values()) < 1 or self.rank < 0:
            raise refuse("erasing", counts | {"rank": self.rank}, "1 or more each, rank 0 or more", "use the defaults")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise refuse("lr", self.lr, "a positive number", "3e-4 for weights, 2e-3 for a LoRA")
        if not self.starts or not set(self.starts) <= set(STARTS):
            raise refuse("starts", self.starts, STARTS, "use all three")
        if self.keep not in KEEP:
            raise refuse("keep", self.keep, KEEP, "predictions changes ordinary captions least")

    @property
    def total(self) -> int:
        """Updates of the weights in all."""
        return self.rounds * self.updates


@dataclass(frozen=True)
class EraseData:
    """What is to be forgotten and what is to be kept; all latents in the model's own scale.

    Attributes:
        text: (P, T, D) states of the prompts that call the pictures.
        pictures: (P, C, h, w) the pictures.
        surrogates: (P, N, C, h, w) samples to put in their place; none may be a copy itself.
        ordinary_text, ordinary: (M, T, D) and (M, C, h, w), unrelated captions with their pictures.
    """

    text: torch.Tensor
    pictures: torch.Tensor
    surrogates: torch.Tensor
    ordinary_text: torch.Tensor
    ordinary: torch.Tensor

    def __post_init__(self) -> None:
        counts = len(self.text), len(self.pictures), len(self.surrogates)
        if not counts[0] or len(set(counts)) > 1 or self.surrogates.ndim != 5 or not self.surrogates.shape[1]:
            accepted = "one text, one picture and a surrogate at least for each prompt"
            raise refuse("prompts, pictures, surrogates", counts, accepted, "sample surrogates with neurons blocked")
        if not len(self.ordinary) or len(self.ordinary) != len(self.ordinary_text):
            pair = (len(self.ordinary_text), len(self.ordinary))
            raise refuse("ordinary captions, pictures", pair, "as many of both, 100 or more", "sample their pictures")
        if self.text.shape[1:] != self.ordinary_text.shape[1:]:
            shown = (tuple(self.text.shape), tuple(self.ordinary_text.shape))
            raise refuse("text states", shown, "of one length and width", "encode both with one pipeline")


@dataclass(frozen=True)
class Erased:
    """The outcome.

    Attributes:
        weights: all weights (module names), or the LoRA's under kohya's names (``lora_unet_<module>.lora_up.weight``).
        rank: of the LoRA; 0: these are all weights.
    """

    weights: dict[str, torch.Tensor]
    rank: int

    def save(self, path: str | Path) -> Path:
        """One safetensors file: a LoRA for diffusers and ComfyUI, or what ``unet.load_state_dict`` takes."""
        return save_safetensors(path, {k: v.contiguous() for k, v in self.weights.items()}, {"format": "pt"})


class Eraser:
    """A resumable training on a copy of the network; the network itself is read and never changed."""

    def __init__(
        self, denoiser: Denoiser, data: EraseData, config: EraseConfig, folder: str | Path | None = None,
        identity: object = "",
    ) -> None:  # fmt: skip
        self.config, self.data, self.step = config, data, 0
        self._losses = FiniteLosses("loss of the erasure")
        self.untouched = denoiser
        net = copied(denoiser.backbone, torch.float32).requires_grad_(not config.rank)
        if config.rank:
            _add_lora(net, config)
        self.backbone = net
        self.denoiser = replace(denoiser, backbone=net, call=call_of(net))
        self.trained = {k: v for k, v in net.named_parameters() if v.requires_grad}
        self.optimizer = torch.optim.Adam(self.trained.values(), lr=config.lr)
        self.pool = data.text.detach().float()[None]  # (rounds + 1, P, T, D): the prompts themselves call them too
        made_of = identity if isinstance(identity, Mapping) else {"data": data, "further inputs": identity}
        settings = {"settings": replace(config, save_every=1)}
        self._run = Run(folder, "NEMO erase", {**denoiser.inputs, **made_of, **settings})
        self._resume()

    def run(self, until: int | None = None, progress: Progress = silent) -> None:
        """Train until ``until`` updates (None: all); an interrupted run resumes from the last save."""
        total = self.config.total

        def step() -> None:
            # an attack takes as long as many updates: it too is stopped within a step
            self.update(lambda *_: progress(self.step, total, None))

        with self._run:
            run_steps(
                step, lambda: self.step, total, until=until, save=self._save, save_every=self.config.save_every,
                progress=progress,
            )  # fmt: skip

    def update(self, progress: Progress = silent) -> None:
        """One update of the weights, after an attack where a round begins."""
        try:
            if self.step == (len(self.pool) - 1) * self.config.updates:
                self._attack(progress)
        except BaseException:
            self._save()  # of the state before this round
            raise
        set_rate(self.optimizer, learning_rate(self.config.lr, "cosine", self.step, self.config.total))
        self.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self._loss(self._generator(0))
            self._losses.see(loss)
            loss.backward()
        self.optimizer.step()
        self.step += 1

    def result(self) -> Erased:
        """The current weights."""
        if not self.config.rank:
            return Erased({k: v.detach().clone() for k, v in self.backbone.state_dict().items()}, 0)
        lora = of_peft({name: value.detach().clone() for name, value in self.trained.items()})
        return Erased(kohya(lora), self.config.rank)

    def _attack(self, progress: Progress) -> None:
        """DoRI on the current weights: one embedding for each picture, all at once."""
        number = len(self.pool) - 1
        g = self._generator(1)
        start = self._start(self.config.starts[number % len(self.config.starts)], g)
        attack = replace(self.config.attack, seed=self.config.attack.seed + 1 + number)
        state = {p: p.requires_grad for p in self.trained.values()}
        for p in state:
            p.requires_grad_(False)
        try:
            called = optimised_text(self.denoiser, Condition(start), self.data.pictures, attack, progress)
        finally:
            for p, wanted in state.items():
                p.requires_grad_(wanted)
        self.pool = torch.cat([self.pool, called[None]])

    def _start(self, kind: str, g: torch.Generator) -> torch.Tensor:
        text = self.data.text.detach().float()
        if kind == "random":
            mean, std = (v.detach() for v in (text.mean((0, 1)), text.std((0, 1))))
            return mean + std * torch.randn(text.shape, generator=g).to(text)
        if kind == "other":
            return self.data.ordinary_text[self._draw(len(self.data.ordinary), len(text), g)].detach().float()
        return text

    def _loss(self, g: torch.Generator) -> torch.Tensor:
        """L_adv + L_keep of one batch each, in one forward."""
        data, n = self.data, self.config.batch
        who, which = self._draw(len(data.text), n, g), self._draw(data.surrogates.shape[1], n, g)
        rounds = self._draw(len(self.pool), n, g)
        rounds[: n // 2] = len(self.pool) - 1  # half of them are this round's, half of any
        other = self._draw(len(data.ordinary), n, g)
        text = torch.cat([self.pool[rounds, who], data.ordinary_text[other].to(self.pool)])
        x0 = torch.cat([data.surrogates[who, which], data.ordinary[other]]).float()
        noise = torch.randn(x0.shape, generator=g).to(x0)
        t = torch.randint(self.denoiser.schedule.steps, (2 * n,), generator=g).float().to(x0.device)
        x_t = self.denoiser.network_input(x0, noise, t)
        output = self.denoiser.forward(x_t, t, Condition(text))
        if self.config.keep == "predictions":
            with torch.no_grad():
                dtype = dtype_of(self.untouched.backbone)
                kept = self.untouched.predict(x_t[n:].to(dtype), t[n:], Condition(text[n:].to(dtype)))
            noise = torch.cat([noise[:n], kept.eps.to(noise)])
            x0 = torch.cat([x0[:n], kept.x0.to(x0)])
        error = self.denoiser.error(output, x_t, x0, noise, t).square().mean((1, 2, 3))
        # DoRI (arXiv 2507.16880): L = L_adv + L_DM, where L_adv = || eps - eps_theta(x~_t, t, y_adv) ||^2; v and flow
        # networks in their own terms
        return error[:n].mean() + error[n:].mean()

    def _draw(self, among: int, count: int, g: torch.Generator) -> torch.Tensor:
        return torch.randint(among, (count,), generator=g)

    def _generator(self, purpose: int) -> torch.Generator:
        """Of this step alone, so that a resumed run uses the same random numbers as an uninterrupted one."""
        return torch.Generator().manual_seed((self.config.seed * 2 + purpose) * 1_000_003 + self.step)

    def _save(self) -> None:
        weights: Mapping[str, torch.Tensor] = {k: v.detach() for k, v in self.trained.items()}
        tensors = {"weight": weights, "pool": {"text": self.pool}}
        self._run.save(tensors, {"adam": self.optimizer}, {"step": self.step})

    def _resume(self) -> None:
        state = self._run.load({"adam": self.optimizer})
        if state is not None:
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    parameter.copy_(state.tensors["weight"][name])
            self.pool, self.step = state.tensors["pool"]["text"].to(self.pool), integer(state.facts["step"], "step")


def _add_lora(net: nn.Module, config: EraseConfig) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    names: list[Any] = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    targets = [name for name in names if name.endswith(TARGETS)]
    if not targets:
        raise refuse("rank", config.rank, "a network with attention layers of diffusers' names", "use rank 0")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        inject_adapter_in_model(LoraConfig(r=config.rank, lora_alpha=config.rank, target_modules=targets), net)


def erase(
    denoiser: Denoiser, data: EraseData, config: EraseConfig, *, folder: str | Path | None = None,
    identity: object = "", progress: Progress = silent,
) -> Erased:  # fmt: skip
    """Trains a copy of the network until the pictures are not called any more (DoRI, arXiv 2507.16880).

    Args:
        folder: for the state of the run; the same call resumes from it, also after the process was killed.
        identity: a table says what the data were made of, where sampling them anew may round otherwise; then the data
            themselves are not compared. Everything else is compared too.
    """
    eraser = Eraser(denoiser, data, config, folder, identity)
    eraser.run(progress=progress)
    return eraser.result()
