"""NaN and infinity are refused where they arise, before anything is computed from them."""

from __future__ import annotations

import torch

from ..errors import refuse
from ..io.number_checks import all_finite

REMEDY = "run the network in float32 or bfloat16, and check its weights and LoRAs"


def require_finite(values: torch.Tensor, what: str, remedy: str = REMEDY) -> None:
    """Refuses NaN and infinity; synchronises with the device."""
    if not all_finite(values):
        bad = ~torch.isfinite(values.detach())
        shown = f"{float(values.detach()[bad].flatten()[0])} in {int(bad.sum())} of {values.numel()}"
        raise refuse(what, shown, "finite numbers", remedy)


class FiniteLosses:
    """Stops training when the loss is not finite: at once on a CPU, elsewhere within ``every`` steps.

    There is no device synchronisation in between.
    """

    def __init__(self, what: str, every: int = 16) -> None:
        self.what, self.every = what, every
        self._pending: list[torch.Tensor] = []

    def see(self, losses: torch.Tensor) -> None:
        """Records the losses of one step."""
        self._pending.append(losses.detach().flatten())
        if losses.device.type == "cpu" or len(self._pending) >= self.every:
            seen = torch.cat(self._pending)
            self._pending.clear()
            require_finite(seen, self.what, "use a smaller learning rate, or a float32 network")
