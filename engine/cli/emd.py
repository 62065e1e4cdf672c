"""``vitrine emd train``: distil a one-step student. Heavy imports wait for ``run``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from ..errors import refuse

PORTRAITS: dict[str, Any] = {
    "steps": 3000, "batch": 32, "rank": 16, "guidance": 3.0, "score_updates": 2, "ema": 0.999,
    "lr_generator": 1e-4, "lr_score": 5e-4, "weight": "dmd", "meter_every": 100, "chain": {"steps": 4, "ge": 0.16},
}  # fmt: skip


@dataclass(frozen=True)
class Train:
    """Distil a one-step student; the same command resumes an interrupted run, bit for bit.

    CONFIG is a JSON file: {"model": folder or hub id, "prompts": text file, "base": name, "train": {settings}}.
    Without one, a student of the portraits model is trained.
    """

    config: Positional[Path | None] = None
    """JSON file; see above."""
    out: Path = Path("emd-student")
    """Folder for state.safetensors and the exported LoRA files."""
    stop_after: int | None = None
    """Stop when so many steps are done in all (the state is saved)."""
    diff_instruct: bool = False
    """Train the baseline instead: one step of eps, z frozen."""

    def run(self) -> int:
        """0 when finished."""
        import dataclasses

        from ..emd.config import EStepConfig
        from ..emd.train import EMDTrainConfig, Trainer
        from ..progress import TqdmProgress

        told = json.loads(self.config.read_text()) if self.config else {"train": PORTRAITS}
        unknown = set(told) - {"model", "prompts", "base", "train"}
        if unknown:
            raise refuse("config", sorted(unknown), "model, prompts, base, train", "remove them")
        config = EMDTrainConfig.from_dict(told.get("train", {}))
        if self.diff_instruct:
            config = dataclasses.replace(config, chain=EStepConfig.diff_instruct())
        teacher, conditions, null, shape, contract = _parts(told)
        trainer = Trainer(teacher, conditions, shape, config, self.out, null, contract)
        files = trainer.run(TqdmProgress("distilling"), self.stop_after)
        print(f"gz {trainer.chain.gz:.3g}, skipped {trainer.skipped}, bias {trainer.meter}")
        print("student: " + ", ".join(map(str, files)))
        return 0


def _parts(told: dict[str, Any]) -> tuple[Any, ...]:
    """Teacher, encoded prompts, encoded empty prompt, latent shape, contract."""
    import torch

    from ..denoiser import Condition, Denoiser
    from ..emd.contract import StudentContract

    pipe, prompts = _pipeline(told)
    with torch.no_grad():
        texts = [pipe.encode_prompt(prompts[i : i + 64], "cpu", 1, False)[0] for i in range(0, len(prompts), 64)]
        null = pipe.encode_prompt([""], "cpu", 1, False)[0]
    side = pipe.unet.config.sample_size
    shape = (pipe.unet.config.in_channels, *((side, side) if isinstance(side, int) else side))
    scale = float(pipe.vae.config.scaling_factor)
    contract = StudentContract(told.get("base", told.get("model", "portraits")), latent_scale=scale)
    return Denoiser.from_diffusers(pipe), Condition(torch.cat(texts)), Condition(null), shape, contract


def _pipeline(told: dict[str, Any]) -> tuple[Any, list[str]]:
    """The pipeline, and the prompts to train on."""
    if told.get("model", "portraits") == "portraits":
        from ..portraits import caption, load_portraits, sample_scenes

        return load_portraits().pipeline(), [caption(s) for s in sample_scenes(list(range(200_000, 202_000)))]
    from diffusers import StableDiffusionPipeline

    if "prompts" not in told:
        raise refuse("config", "no prompts", "a text file with one prompt a line", 'add "prompts": "prompts.txt"')
    lines = [line.strip() for line in Path(told["prompts"]).read_text().splitlines() if line.strip()]
    return StableDiffusionPipeline.from_pretrained(told["model"]), lines


COMMANDS: dict[str, type] = {"train": Train}
