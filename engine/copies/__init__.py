"""Which pictures a model or a LoRA gives back: the copy check of prompts, and the report on LoRA files."""

from .copy_check import CheckConfig, CheckedPrompt, CopyCheck, Instruments, check_copies
from .lora_report import LoraReport, Material, lora_report
from .lora_samples import ReportConfig
from .nearest import Pictures, pictures_of
from .pages import write_check

__all__ = [
    "CheckConfig", "CheckedPrompt", "CopyCheck", "Instruments", "LoraReport", "Material", "Pictures", "ReportConfig",
    "check_copies", "lora_report", "pictures_of", "write_check",
]  # fmt: skip
