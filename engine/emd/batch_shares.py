"""Which rows of a batch belong to which process."""

from __future__ import annotations

from typing import Any

import torch


class Shares:
    """The rows of each batch that are this process's: every n-th of n processes.

    Args:
        accelerator: accelerate's ``Accelerator``.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self.device = accelerator, accelerator.device

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """Of something drawn for the whole batch, (B, ...), where it is."""
        return batch[self._accelerator.process_index :: self._accelerator.num_processes].contiguous()

    def own(self, batch: torch.Tensor) -> torch.Tensor:
        """:meth:`rows`, on this process's device."""
        rows = self.rows(batch)
        wide = rows.dtype == torch.float64 and self.device.type != "cpu"  # accelerators may have no float64
        return rows.to(self.device, torch.float32 if wide else rows.dtype)

    def in_any(self, flag: bool) -> bool:
        """True if it is in any process: either all of them take part in an update, or none."""
        if self._accelerator.num_processes == 1:
            return flag
        present = torch.tensor(int(flag), device=self.device)
        return bool(self._accelerator.reduce(present, "sum") > 0)
