"""One callback for every long loop: ``progress(step, total, preview)``.

The caller decides what it does: show a bar or a preview, or stop the work by raising. The engine never catches what a
callback raises; it only cleans up in ``finally``. tqdm and ComfyUI's progress bar are both such callbacks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Interrupted(BaseException):
    """Raised by a progress callback to stop the work. Not an ``Exception``, so no handler swallows it by accident."""


class Progress(Protocol):
    """Called after each step with the number of steps done, their total, and a preview or None.

    The preview is images (B, 3, H, W) in [0, 1], or latents (B, C, h, w) if the job has no VAE.

    Steps with one total take about equally long, so that a bar can estimate the time left; a job of several parts
    counts each separately. The first call of a resumed run includes the steps that were already done.
    """

    def __call__(self, step: int, total: int, preview: torch.Tensor | None = None) -> None: ...


def silent(step: int, total: int, preview: torch.Tensor | None = None) -> None:
    """Does nothing."""


class TqdmProgress:
    """A tqdm bar with a label and the time left, closed once the total is reached.

    Args:
        shown: False shows no bar, for all but one of several processes.
    """

    def __init__(self, label: str = "", shown: bool = True) -> None:
        self.label, self.shown = label, shown
        self._bar: Any = None

    def __call__(self, step: int, total: int, preview: torch.Tensor | None = None) -> None:
        from tqdm.auto import tqdm

        if self._bar is not None and self._bar.total != total:  # the next part of the work
            self.close()
        if self._bar is None:
            # steps done before the bar started must not count towards its speed
            self._bar = tqdm(
                total=total, initial=step, desc=self.label, leave=False, disable=None if self.shown else True
            )
        self._bar.update(step - self._bar.n)
        if step >= total:
            self.close()

    def close(self) -> None:
        """Closes the bar; idempotent."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
