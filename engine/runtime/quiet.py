"""Libraries without their noise: messages that say nothing to whoever runs a command or an example, bars of files."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

NOISE = (
    ("transformers.utils.import_utils", "requires torchvision (not installed)"),
    ("diffusers.models.modeling_utils", "should be kept in float32: []"),
    ("diffusers.loaders.lora_base", "No LoRA keys associated to"),
)
"""(logger, part of a message) that says nothing to a user: of an optional package whose place another
takes, of an empty list of modules, of a LoRA for the network alone that has no keys for the text encoders."""
DEPRECATED = "`torch_dtype` is deprecated"
"""Of diffusers, to whoever calls it: this pack, which runs on versions without the new name too."""


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Leaves out the messages in :data:`NOISE` and :data:`DEPRECATED`; no library is imported for it."""
    filters = [(logging.getLogger(name), _Without(part)) for name, part in NOISE]
    for logger, without in filters:
        logger.addFilter(without)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)
            yield
    finally:
        for logger, without in filters:
            logger.removeFilter(without)


class _Without(logging.Filter):
    """Lets all messages pass but those that contain a text."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def filter(self, record: logging.LogRecord) -> bool:
        return self.part not in record.getMessage()


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Bars of loaded files are not shown: for the shipped models, whose files take milliseconds, and for commands."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    shown = [library for library in (of_diffusers, of_transformers) if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()
