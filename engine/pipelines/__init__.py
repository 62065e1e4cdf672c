"""One diffusers pipeline for each method, imported only when asked for: diffusers is heavy."""

from __future__ import annotations

import importlib
from typing import Any

from ..runtime.missing_names import warn_of_missing_names
from ..runtime.quiet import quiet_libraries

_HOMES = {
    "ActivationTapPipeline": ".activation_tap",
    "ActivationTapPipelineOutput": ".activation_tap",
    "ControlConditionedPipeline": ".control",
    "ControlConditionedPipelineOutput": ".control",
    "EMDOneStepPipeline": ".emd",
    "CorrespondencePipeline": ".matching",
    "SegmentationPipeline": ".matching",
    "NEMOPipeline": ".nemo",
    "adjust_prompt": ".nemo_jobs",
    "import_statistics": ".nemo_jobs",
    "verify_blocking": ".nemo_jobs",
    "copy_check": ".copies",
    "lora_report": "..copies.lora_report",
    "PipelineModel": ".copies",
    "W2WPipeline": ".w2w",
    "ResolutionTransferPipeline": ".resolution",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with quiet_libraries():
            pipeline = getattr(importlib.import_module(_HOMES[name], __name__), name)
        warn_of_missing_names()
        return pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
