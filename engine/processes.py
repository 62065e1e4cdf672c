"""The processes of ``accelerate launch`` or ``torchrun``, on GPUs or on CPU cores."""

from __future__ import annotations

from typing import Any

import torch


def processes() -> Any:
    """accelerate's ``PartialState``: this process's number of how many, and its device.

    accelerate forms no group of CPU processes unless it is told that there is no accelerator.
    """
    from accelerate import PartialState

    return PartialState(cpu=not torch.accelerator.is_available())
