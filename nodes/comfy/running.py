"""A sampling run as its forwards see it: whose rows these are, which step it is, and whether guidance uses the pass.

Nothing is inferred from the order of rows. Each conditioning of a guider has a uuid, and core tells every forward the
uuids of its parts; steps are looked up in the sigmas that the sampler got.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.conds
import comfy.patcher_extension
import torch

from ...engine.errors import refuse
from .own_patches import check_own_patches

RUN = "vitrine.run"
"""Key of the :class:`Running` in ``transformer_options``, and of the wrappers that keep it up to date."""
_WRAPPERS = comfy.patcher_extension.WrappersMP
_PROMPTED = {
    "positive": True,
    "null": True,
    "negative": False,
    "controlled_negative": False,
    "middle": False,
    "empty_negative_prompt": False,
}
"""Names that core's guiders and ours give their conditionings -> whether they are the prompt.

Core itself calls the ``middle`` of its Dual CFG Guider and the empty prompt of its Perp-Neg Guider negative.
"""


@dataclass(frozen=True)
class Part:
    """One conditioning of a run: equal parts of a forward's batch belong to one each.

    Attributes:
        role: the guider's name of it, such as ``positive``; ``other`` if it is not the guider's.
        number, of: which of the role's conditionings it is, from 1, and how many there are.
        prompted: whether it is the prompt, not a negative one; None where nothing says so.
        tokens: length of its own prompt where core may repeat it to match a longer one, else None.
    """

    role: str
    number: int = 1
    of: int = 1
    prompted: bool | None = None
    tokens: int | None = None

    @property
    def name(self) -> str:
        """As a recording calls it: ``cond``, ``uncond`` or the guider's word, with a number where there are several."""
        name = {"positive": "cond", "negative": "uncond"}.get(self.role, self.role)
        return name if self.of == 1 else f"{name} {self.number}"


OTHER = Part("other")


class Running:
    """What is known of one sampling run, or of one forward outside of any.

    Attributes:
        sigmas: the noise levels of the run, the last one that of its end; empty outside a run.
        models: the ComfyUI models of the run. Another one may run in between, such as the negative's of Dual Model CFG.
        evaluation: number of the denoiser call that is running, from 0.
        clean: what the last step predicted as the clean latents; None before the first one's end.
        plain: whether the running pass is one that guidance starts from, not one that a patch adds or changes.
    """

    def __init__(self) -> None:
        self.sigmas: list[float] = []
        self.models: list[Any] = []
        self.evaluation, self.plain = -1, True
        self.clean: torch.Tensor | None = None
        self._parts: dict[uuid.UUID, Part] = {}
        self._steps_done, self._churns = 0, False
        self._call: tuple[Any, Any] | None = None
        self._rows = 0
        self._sigma: tuple[torch.Tensor, float] | None = None

    @property
    def steps(self) -> int:
        """Steps of the run; 0 outside one."""
        return max(0, len(self.sigmas) - 1)

    def parts(self, options: dict[str, Any]) -> list[Part]:
        """The parts of a forward's batch, in its order, from its ``transformer_options``."""
        return [self._parts.get(key, OTHER) for key in options.get("uuids") or [None]]

    def whole(self, x: torch.Tensor, parts: int) -> bool:
        """Whether a forward's batch is the pass's, each part with all of its rows: not pieces of it, nor tiles."""
        return not self._rows or len(x) == self._rows * parts

    def owns(self, base: Any) -> bool:
        """Whether a ComfyUI model is the run's own."""
        return not self.models or any(base is model for model in self.models)

    def step_of(self, sigmas: torch.Tensor) -> tuple[int, bool]:
        """Which step of the run a noise level belongs to, from 0, and whether the step begins there.

        Samplers of second order also evaluate between two levels, or at the next step's.
        """
        sigma = self._number(sigmas)
        same = [i for i, level in enumerate(self.sigmas[:-1]) if math.isclose(level, sigma, rel_tol=1e-5)]
        if same:
            return min(same, key=lambda i: abs(i - self._steps_done)), True
        if self._churns or not self.sigmas:
            return self._steps_done, self._churns
        above = [i for i, level in enumerate(self.sigmas[:-1]) if level > sigma]
        return (above[-1] if above else 0), False

    def _number(self, sigmas: torch.Tensor) -> float:
        """Read from the device once a call of the denoiser, not once a forward."""
        if self._sigma is None or self._sigma[0] is not sigmas:
            self._sigma = sigmas, float(sigmas.flatten()[0])
        return self._sigma[1]

    # --- kept up to date by the wrappers below ---
    def start(self, guider: Any, sigmas: torch.Tensor, sampler: Any, options: dict[str, Any]) -> None:
        """The sampler is about to run; ``guider.conds`` are final."""
        clones = options.get("multigpu_clones", {}).values()
        self.models = [guider.inner_model, *(clone.model for clone in clones)]
        self.sigmas = sigmas.detach().cpu().double().tolist()
        self._churns = bool(getattr(sampler, "extra_options", {}).get("s_churn"))
        self._steps_done = 0
        self.name(guider.conds)

    def name(self, conds: dict[str, list[dict[str, Any]]]) -> None:
        """Take note of a guider's conditionings.

        Those that core copied for the areas of another role came with that one's uuid, and get one of their own.
        """
        times = Counter(cond["uuid"] for role in conds.values() for cond in role)
        seen: set[uuid.UUID] = set()
        for role, several in conds.items():
            for number, cond in enumerate(several, 1):
                if times[cond["uuid"]] > 1 and cond["uuid"] in seen:
                    cond["uuid"] = uuid.uuid4()
                seen.add(cond["uuid"])
                prompted = _PROMPTED.get(role, _told(cond))
                self._parts[cond["uuid"]] = Part(role, number, len(several), prompted, _tokens(cond))

    def add(self, key: uuid.UUID, part: Part) -> None:
        """One conditioning more."""
        self._parts[key] = part

    def calling(self, x: torch.Tensor, options: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Around one call of the denoiser, at (B, C, H, W) ``x`` with the sampler's options."""
        before, self.evaluation = (self._call, self.plain), self.evaluation + 1
        self._call, self.plain = (x, options), False
        try:
            return call()
        finally:
            self._call, self.plain = before

    def passing(self, x: torch.Tensor, options: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Around one batch of conditionings within a call."""
        before = (self.plain, self._rows)
        self.plain = self._call is None or (x is self._call[0] and _same(options, self._call[1]))
        self._rows = len(x)
        try:
            return call()
        finally:
            self.plain, self._rows = before

    @contextmanager
    def on(self, patcher: Any) -> Iterator[None]:
        """While open, a MODEL runs on its own account."""
        patcher.set_attachments(RUN, self)
        try:
            yield
        finally:
            patcher.remove_attachments(RUN)

    def counting(self, callback: Callable | None) -> Callable:
        """The sampler's callback, which ends a step."""

        def counted(step: int, clean: Any, *args: Any, **kwargs: Any) -> Any:
            self._steps_done, self.clean = step + 1, clean
            return None if callback is None else callback(step, clean, *args, **kwargs)

        return counted


def one_forward(model: Any, keys: Sequence[uuid.UUID]) -> Running:
    """For a forward outside a run: its conditionings are the prompt's."""
    running = Running()
    running.models = [model.model]
    for number, key in enumerate(keys, 1):
        running.add(key, Part("positive", number, len(keys), prompted=True))
    return running


def _told(cond: dict[str, Any]) -> bool | None:
    """What a conditioning says of itself, where the guider's name for it says nothing."""
    return {"positive": True, "negative": False}.get(cond.get("prompt_type", ""))


def _tokens(cond: dict[str, Any]) -> int | None:
    text = cond.get("model_conds", {}).get("c_crossattn")
    return int(text.cond.shape[1]) if isinstance(text, comfy.conds.CONDCrossAttn) else None


def _same(a: Any, b: Any) -> bool:
    """Whether nested options contain the same objects."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, (str, int, float, bool)) and type(a) is type(b) and a == b


# --- the wrappers -------------------------------------------------------------------------------------------------
def watched(model: Any) -> Any:
    """A clone whose runs keep a :class:`Running` in their ``transformer_options``; the model itself if it has one."""
    if model.wrappers.get(_WRAPPERS.OUTER_SAMPLE, {}).get(RUN):
        return model
    clone = model.clone()
    wrappers: dict[str, Callable] = {
        _WRAPPERS.OUTER_SAMPLE: _outer_sample,
        _WRAPPERS.SAMPLER_SAMPLE: _sampler_sample,
        _WRAPPERS.PREDICT_NOISE: _predict_noise,
        _WRAPPERS.CALC_COND_BATCH: _calc_cond_batch,
    }
    for kind, wrapper in wrappers.items():
        clone.add_wrapper_with_key(kind, RUN, wrapper)
    clone.add_callback_with_key(comfy.patcher_extension.CallbacksMP.ON_PRE_RUN, RUN, _own_run)
    return clone


def _own_run(patcher: Any) -> None:
    """What the pack put on the MODEL is there, and it runs with its own options.

    Core's Dual Model CFG Guider runs its second MODEL with the first one's options: nothing on it would act.
    """
    if patcher.get_attachment(RUN) is None and not patcher.is_multigpu_base_clone:
        shown, accepted = "a MODEL with nodes of Vitrine, run beside another", "the guider's own MODEL"
        remedy = "put the nodes on the guider's `model`, or connect `model_negative` from before them"
        raise refuse("model", shown, accepted, remedy)
    check_own_patches(patcher)


def running_in(options: dict[str, Any]) -> Running | None:
    """The run of a forward's ``transformer_options``; None where no guider runs it."""
    return options.get(RUN)


def _of(model_options: dict[str, Any]) -> Running:
    running = model_options.get("transformer_options", {}).get(RUN)
    if running is None:
        raise refuse("sampling", "without a guider of ComfyUI's", "KSampler, SamplerCustom or a GUIDER", "use one")
    return running  # type: ignore[no-any-return]


def _outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
    guider, running = executor.class_obj, Running()
    options = guider.model_options["transformer_options"]  # a copy of this run's own
    before, options[RUN] = options.get(RUN), running
    try:
        with running.on(guider.model_patcher):
            return executor(*args, **kwargs)
    finally:
        options[RUN] = before


def _sampler_sample(
    executor: Any, guider: Any, sigmas: torch.Tensor, extra_args: dict, callback: Any, *args: Any, **kwargs: Any
) -> Any:
    running = _of(extra_args["model_options"])
    running.start(guider, sigmas, executor.class_obj, extra_args["model_options"])
    return executor(guider, sigmas, extra_args, running.counting(callback), *args, **kwargs)


def _predict_noise(executor: Any, x: Any, timestep: Any, model_options: Any = None, *args: Any, **kwargs: Any) -> Any:
    options = model_options or {}
    return _of(options).calling(x, options, lambda: executor(x, timestep, options, *args, **kwargs))


def _calc_cond_batch(executor: Any, model: Any, conds: Any, x: Any, timestep: Any, model_options: Any) -> Any:
    running = _of(model_options)
    return running.passing(x, model_options, lambda: executor(model, conds, x, timestep, model_options))
