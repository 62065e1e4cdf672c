"""Noise schedules: sigma, alpha-bar, log-SNR and the network's timestep as functions of each other.

Numbers and CPU tensors are computed in float64. Tensors on any other device are computed in float32 and without
synchronisation: accelerators are slow in float64, and some do not support it.

Two kinds. ``vp`` (DDPM and its descendants): x_t = sqrt(abar) x0 + sqrt(1 - abar) eps with
sigma = sqrt((1 - abar) / abar) (Karras et al. 2022, Table 1). ``flow`` (rectified flow): x_t = (1 - s) x0 + s eps with
sigma = s, and the network's timestep is 1000 s.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import refuse
from ..families import record_of

Number = float | torch.Tensor


def append_dims(values: torch.Tensor, ndim: int) -> torch.Tensor:
    """One number per batch row, or one for all: (B,) or () -> (B, 1, ..., 1) or (1, ..., 1) of ``ndim`` axes."""
    return values.reshape(-1, *[1] * (ndim - 1))


def wide(values: Number) -> torch.Tensor:
    """float64 on the CPU, float32 elsewhere."""
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        return values.to(torch.float32)
    return torch.as_tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class NoiseSchedule:
    """The schedule of one model.

    Attributes:
        kind: ``"vp"`` or ``"flow"``.
        log_sigmas: (R,) float64, log sigma at timesteps k - 1, 2 k - 1 .. T - 1 with k = T / R (``vp``), which are
            0 .. T - 1 but for distilled models that know every k-th timestep only; empty for ``flow``.
        steps: T, the number of training timesteps.
    """

    kind: str
    log_sigmas: torch.Tensor
    steps: int = 1000
    _tables: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_betas(cls, betas: torch.Tensor) -> NoiseSchedule:
        """From T betas in (0, 1) (Ho et al. 2020, abar_t = prod (1 - beta))."""
        return cls.from_alphas_cumprod(torch.cumprod(1 - torch.as_tensor(betas, dtype=torch.float64), 0))

    @classmethod
    def from_alphas_cumprod(cls, alphas_cumprod: torch.Tensor) -> NoiseSchedule:
        """From T values of abar strictly between 0 and 1; the last may be 0 (zero terminal SNR)."""
        abar = torch.as_tensor(alphas_cumprod, dtype=torch.float64).cpu()
        if abar.ndim != 1 or len(abar) < 2 or not bool(((abar >= 0) & (abar < 1)).all()):
            raise refuse("alphas_cumprod", tuple(abar.shape), "1-d values in [0, 1)", "pass scheduler.alphas_cumprod")
        abar = abar.clamp(min=2.0**-40)  # zero terminal SNR: keeps log sigma finite, abar below any float32 effect
        return cls("vp", 0.5 * torch.log((1 - abar) / abar), len(abar))

    @classmethod
    def scaled_linear(cls, steps: int = 1000, start: float = 0.00085, end: float = 0.012) -> NoiseSchedule:
        """Stable Diffusion's table: betas linear in their square root."""
        return cls.from_betas(torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float64) ** 2)

    @classmethod
    def flow(cls, steps: int = 1000) -> NoiseSchedule:
        """Rectified flow. A shift changes which times a sampler visits, not what a time means, so it is ignored."""
        return cls("flow", torch.empty(0, dtype=torch.float64), steps)

    @classmethod
    def from_diffusers(cls, scheduler: Any) -> NoiseSchedule:
        """From a diffusers scheduler."""
        return convention_of(scheduler)[0]

    def sigma(self, t: Number) -> torch.Tensor:
        """Sigma at timestep t in [0, T - 1] (``vp``; fractions interpolate log sigma) or [0, T] (``flow``)."""
        t = self._checked(t)
        if self.kind == "flow":
            return t / self.steps
        row = self._row(t)
        low = row.floor().long().clamp(max=len(self.log_sigmas) - 2)
        fraction = row - low
        table = self._table(t.device)
        return torch.exp((1 - fraction) * table[low] + fraction * table[low + 1])

    def timestep(self, sigma: Number) -> torch.Tensor:
        """The network's timestep at a sigma: the inverse of :meth:`sigma`, clamped to the ends of the table."""
        sigma = wide(sigma)
        if self.kind == "flow":
            return sigma * self.steps
        table, wanted = self._table(sigma.device), torch.log(sigma)
        low = (torch.searchsorted(table, wanted.contiguous()) - 1).clamp(0, len(table) - 2)
        fraction = (wanted - table[low]) / (table[low + 1] - table[low])
        row = low + fraction.clamp(0, 1)
        every = self._every
        return row if every == 1 else every * (row + 1) - 1

    def alpha_bar(self, t: Number) -> torch.Tensor:
        """abar_t = 1 / (1 + sigma^2) for ``vp``, (1 - s)^2 for ``flow``: in both, its root is the signal scale."""
        sigma = self.sigma(t)
        return (1 - sigma).square() if self.kind == "flow" else 1 / (1 + sigma.square())

    def log_snr(self, t: Number) -> torch.Tensor:
        """log (signal^2 / noise^2)."""
        signal, noise = self.scales(t)
        return 2 * (torch.log(signal) - torch.log(noise))

    def scales(self, t: Number) -> tuple[torch.Tensor, torch.Tensor]:
        """(signal, noise) with x_t = signal x0 + noise eps, in the network's own input scale."""
        sigma = self.sigma(t)
        if self.kind == "flow":
            return 1 - sigma, sigma
        return 1 / torch.sqrt(1 + sigma.square()), sigma / torch.sqrt(1 + sigma.square())

    def add_noise(self, x0: torch.Tensor, noise: torch.Tensor, t: Number) -> torch.Tensor:
        """x_t from x0 and noise (B, ...) at t, a number or (B,); computed in float32 or wider, in x0's dtype."""
        x, eps = wide(x0), wide(noise)
        signal, level = (append_dims(s.to(x.device, x.dtype), x.ndim) for s in self.scales(t))
        return (signal * x + level * eps).to(x0.dtype)

    @property
    def last(self) -> int:
        """The noisiest timestep: T - 1 (``vp``) or T (``flow``)."""
        return self.steps if self.kind == "flow" else self.steps - 1

    @property
    def _every(self) -> int:
        """Timesteps per entry of the table."""
        return self.steps // len(self.log_sigmas)

    def _row(self, t: torch.Tensor) -> torch.Tensor:
        """The (fractional) table index of a timestep, clamped to the first entry."""
        every = self._every
        return t if every == 1 else ((t + 1) / every - 1).clamp(min=0)

    def _table(self, device: torch.device) -> torch.Tensor:
        """log sigmas on that device; uploaded once."""
        if device not in self._tables:
            on_cpu = device.type == "cpu"
            self._tables[device] = self.log_sigmas if on_cpu else self.log_sigmas.float().to(device)
        return self._tables[device]

    def _checked(self, t: Number) -> torch.Tensor:
        t = wide(t)
        if t.device.type != "cpu":
            return t  # checking it would synchronise with the device
        last = self.last
        if not math.isfinite(float(t.sum())) or bool((t < 0).any()) or bool((t > last).any()):
            raise refuse("timestep", t.tolist(), f"0 <= t <= {last}", "t is the network's own timestep")
        return t


# --- diffusers' schedulers ------------------------------------------------------------------------------------------
FLOW_SCHEDULERS = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "LTXEulerAncestralRFScheduler",
)
"""Schedulers that support only x_t = (1 - s) x0 + s eps. UniPC, DPM++, DEIS and SA have a setting for it."""
_FLOW_STEPS = 1000
"""Every published flow network takes s or 1000 s; pipelines divide the scheduler's timestep by 1000."""
_PREDICTIONS = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}


def convention_of(scheduler: Any, network: Any = None) -> tuple[NoiseSchedule, str]:
    """(schedule, ``eps | v | x0 | flow``): the input scale and output of a network under a diffusers scheduler.

    Shifts, spacings, Karras's and other grids change which times are visited, not what a time means.

    Args:
        network: the UNet or transformer, if given, a scheduler that does not suit its family is refused.
    """
    name, config = type(scheduler).__name__, scheduler.config
    refuse_table_on_flow(scheduler, network)
    if is_flow(scheduler):
        grids = [grid for grid in ("karras", "exponential", "beta") if setting_of(scheduler, f"use_{grid}_sigmas")]
        prediction = "flow_prediction" if _only_flow(scheduler) else config.prediction_type
        if prediction != "flow_prediction" or grids and not _only_flow(scheduler):
            shown = f"{name} with use_flow_sigmas, prediction_type {prediction!r} and {grids or 'no other'} sigmas"
            remedy = "set prediction_type to flow_prediction, and leave other sigmas off"
            raise refuse("scheduler", shown, "flow sigmas with flow_prediction", remedy)
        inverted = bool(setting_of(scheduler, "invert_sigmas"))
        if config.num_train_timesteps != _FLOW_STEPS or inverted:
            shown = f"{name} with {config.num_train_timesteps} timesteps" + ", inverted" * inverted
            raise refuse("scheduler", shown, f"{_FLOW_STEPS} timesteps, not inverted", "set them in its config")
        return NoiseSchedule.flow(_FLOW_STEPS), "flow"
    prediction = _PREDICTIONS.get(config.get("prediction_type", ""), "")
    if getattr(scheduler, "alphas_cumprod", None) is None or not prediction:
        shown = f"{name} with prediction_type {config.get('prediction_type')!r}"
        accepted = f"schedulers with alphas_cumprod that predict {', '.join(_PREDICTIONS)}, or {FLOW_SCHEDULERS}"
        raise refuse("scheduler", shown, accepted, "pass the scheduler that the model was published with")
    if setting_of(scheduler, "timestep_type") == "continuous":
        shown = f"{name} with timestep_type 'continuous', whose network takes log sigma"
        raise refuse("scheduler", shown, "timestep_type 'discrete'", "pass a scheduler that counts timesteps")
    return NoiseSchedule.from_alphas_cumprod(scheduler.alphas_cumprod), prediction


def is_flow(scheduler: Any) -> bool:
    """Whether a diffusers scheduler steps along x_t = (1 - s) x0 + s eps."""
    has_table = getattr(scheduler, "alphas_cumprod", None) is not None  # Helios has none, and resizes between steps
    return _only_flow(scheduler) or has_table and bool(setting_of(scheduler, "use_flow_sigmas"))


def refuse_table_on_flow(scheduler: Any, network: Any) -> None:
    """Refuses a beta-table (vp) scheduler for a flow network, before anything is sampled."""
    record = None if network is None else record_of(network)
    if record is not None and record[0].flow and not is_flow(scheduler):
        accepted = f"{', '.join(FLOW_SCHEDULERS)}, or UniPC, DPM++, DEIS, SA with use_flow_sigmas and flow_prediction"
        shown = f"{type(scheduler).__name__} for {record[0].name}, a flow model"
        raise refuse("scheduler", shown, accepted, "pass the scheduler that the model was published with")


def _only_flow(scheduler: Any) -> bool:
    return any(kind.__name__ in FLOW_SCHEDULERS for kind in type(scheduler).__mro__)


def setting_of(scheduler: Any, setting: str) -> Any:
    """A setting that the scheduler's class reads; ``from_config`` keeps other classes' settings in ``config`` too."""
    taken = setting in inspect.signature(type(scheduler).__init__).parameters
    return scheduler.config.get(setting) if taken else None
