"""The batch rows of each process."""

from __future__ import annotations

from typing import Any

import torch


class BatchPart:
    """This process's part of each batch: every n-th row for n processes.

    Args:
        accelerator: accelerate's ``Accelerator``.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self.device = accelerator, accelerator.device

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """This process's rows of a tensor (B, ...) sampled for the whole batch, on its device."""
        return batch[self._accelerator.process_index :: self._accelerator.num_processes].contiguous()

    def own(self, batch: torch.Tensor) -> torch.Tensor:
        """:meth:`rows`, moved to this process's device."""
        rows = self.rows(batch)
        wide = rows.dtype == torch.float64 and self.device.type != "cpu"  # accelerators may have no float64
        return rows.to(self.device, torch.float32 if wide else rows.dtype)

    def in_any(self, flag: bool) -> bool:
        """Whether the flag is set in any process, so that all or none take part in an update."""
        if self._accelerator.num_processes == 1:
            return flag
        present = torch.tensor(int(flag), device=self.device)
        return bool(self._accelerator.reduce(present, "sum") > 0)
