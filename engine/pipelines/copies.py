"""The copy check and the LoRA report on diffusers' pipelines: LoRA files put on, at any strength, and taken off."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..copies import CheckConfig, CopyCheck, Instruments, Pictures, check_copies, pictures_of, write_check
from ..copies.lora_samples import Loading, OnModel
from ..diffusion.denoiser import Denoiser
from ..diffusion.noise import generators
from ..errors import VitrineError, refuse
from ..io.files import named, refuse_pickle
from ..io.lora_writing import write_lora
from ..jobs.digests import described
from ..nemo import ProbeConfig, make_probe, score_prompts
from ..nemo.ssim import WINDOW
from ..runtime.footprint import memory_bytes, rows_within
from ..runtime.progress import Progress, silent
from ..w2w.loras.base_weights import BaseWeights, modules_of
from ..w2w.loras.lora_facts import LoraFacts, facts_of
from ..w2w.loras.lora_files import read_lora
from .adapter import empty_prompt, encoded, network_of
from .components import components_of
from .conventions import accepted_by
from .nemo import NEMOPipeline
from .nemo_prompts import conditions, latent_shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ADAPTER = "vitrine_copies"
_SHARE = 2
"""Of a budget: one sampling run may take its half."""
_NAMED = 8
"""Layers that are named where they did not arrive."""


class LoraSwitch:
    """One LoRA file on a pipeline, next to those already there, which count as part of the model."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.pipe = pipe
        self._others = list(pipe.get_active_adapters()) if hasattr(pipe, "get_active_adapters") else []
        self._untouched = not any(pipe.get_list_adapters().values()) if hasattr(pipe, "get_list_adapters") else True

    def load(self, path: Path) -> None:
        """Load a file and switch it on."""
        with named(path, "LoRA", "a LoRA of this model, as safetensors", "check the file"):
            self.pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=ADAPTER)
        if ADAPTER not in self.pipe.get_active_adapters():
            raise refuse("LoRA", path.name, "a LoRA of this model", "none of its layers fits")
        self.set(1.0)

    def set(self, strength: float) -> None:
        """A strength, in text encoders too; 0 is the model without it."""
        if strength or self._others:
            self.pipe.enable_lora()
            names = [*self._others, ADAPTER] if strength else self._others
            self.pipe.set_adapters(names, [1.0] * len(self._others) + [strength] * bool(strength))
        else:
            self.pipe.disable_lora()

    def unload(self) -> None:
        """The pipeline as it was before :meth:`load`, whether that loaded or not."""
        if self._untouched:
            self.pipe.unload_lora_weights()
            return
        if any(ADAPTER in names for names in self.pipe.get_list_adapters().values()):
            self.pipe.delete_adapters(ADAPTER)
        if self._others:
            self.pipe.set_adapters(self._others)

    @contextmanager
    def loaded(self, path: str | Path | None) -> Iterator[None]:
        """A file on the pipeline while the block is open; None is no LoRA."""
        if path is None:
            yield
            return
        path = Path(path)
        refuse_pickle(path, "LoRA")
        if not path.is_file():
            raise refuse("LoRA", path.name, "an existing .safetensors file", "check the path")
        try:
            self.load(path)
            yield
        finally:
            self.unload()


# --- the copy check -------------------------------------------------------------------------------------------------
def copy_check(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    folder: str | Path,
    *,
    pictures: str | Path | None = None,
    lora: str | Path | None = None,
    config: CheckConfig | None = None,
    probe: ProbeConfig | None = None,
    tau: float | None = None,
    labels: Sequence[str] = (),
    memory: int | str = "2GB",
    progress: Progress = silent,
    **sampling: Any,
) -> CopyCheck:
    """Which prompts come back as copies, how often, where in the picture, and of which training picture.

    The folder gets ``copies.html``, ``copies.csv`` and the nearest sample of each prompt. The same call resumes where
    an interrupted one stopped; with other settings it is refused.

    Args:
        pipe: any text-to-image pipeline that takes ``prompt``, ``generator`` and ``output_type="pt"``. Scores are
            measured where it has a UNet: Stable Diffusion 1.x, 2.x and SDXL.
        pictures: folder of the training pictures; without them samples of a prompt are compared with each other.
        lora: a .safetensors file, loaded for this check; the model without it says which distance is usual.
        config: seeds, and captions that have nothing to do with the pictures; needed without a LoRA.
        probe, tau: of NeMo's score, and the threshold calibrated with it; without tau there is no verdict.
        labels: one for each prompt, handed through to the table.
        memory: what a sampling run may need beyond the models; it decides how many seeds are sampled at once.
        sampling: as in a call of the pipeline: num_inference_steps, guidance_scale, height, width ...
    """
    accepted = accepted_by(type(pipe))
    unknown = sorted(set(sampling) - (set(accepted) - {"self", "prompt", "generator", "output_type"}))
    if unknown:
        known = sorted(set(accepted) - {"self", "prompt", "generator", "output_type"})
        raise refuse("arguments", unknown, known, f"as {type(pipe).__name__} takes them")
    config, probe, size = config or CheckConfig(), probe or ProbeConfig(), _size(pipe, sampling)
    training = Pictures() if pictures is None else pictures_of(pictures)[0].cropped(size)
    steps = int(sampling.get("num_inference_steps", accepted["num_inference_steps"].default))
    switch = LoraSwitch(pipe)

    def call(prompt: str, seeds: Sequence[int], **settings: Any) -> torch.Tensor:
        images: torch.Tensor = pipe(
            [prompt] * len(seeds), generator=generators(seeds), output_type="pt", **sampling | settings
        ).images
        return images

    def sample(prompt: str, seeds: Sequence[int], bare: bool, after: Callable[[int], None]) -> torch.Tensor:
        def step_end(pipe: DiffusionPipeline, step: int, t: Any, values: dict[str, Any]) -> dict[str, Any]:
            after(step + 1)
            return values

        if lora is not None:
            switch.set(0.0 if bare else 1.0)
        return call(prompt, seeds, **{"callback_on_step_end": step_end} if "callback_on_step_end" in accepted else {})

    try:
        with switch.loaded(lora):
            identity = {
                **components_of(pipe),
                "LoRA": None if lora is None else Path(lora),
                "sampling": sampling,
                "probe": probe,
            }
            # one picture in one step shows what a row takes
            rows = rows_within(
                memory_bytes(memory) // _SHARE, lambda: call("", [0], num_inference_steps=1), config.seeds
            )
            instruments = Instruments(sample, steps, rows, lora is not None, _score(pipe, size, probe), identity)
            check = check_copies(
                list(prompts), folder, instruments, training, config, labels=labels, tau=tau, progress=progress
            )
    finally:
        pipe.maybe_free_model_hooks()  # scores run the network outside of the pipeline's call
    write_check(folder, check, training)
    return check


def _size(pipe: DiffusionPipeline, sampling: dict[str, Any]) -> tuple[int, int]:
    """(height, width) of the samples."""
    side = getattr(network_of(pipe).config, "sample_size", None) or getattr(pipe, "default_sample_size", 64)
    height, width = (side, side) if isinstance(side, int) else list(side or ())[-2:]
    factor = pipe.vae_scale_factor
    return sampling.get("height", height * factor), sampling.get("width", width * factor)


def _score(pipe: DiffusionPipeline, size: tuple[int, int], config: ProbeConfig) -> Callable[[str], float] | None:
    """NeMo's score of a prompt, where the pipeline has a UNet whose text we know how to encode, and room to compare."""
    unet = getattr(pipe, "unet", None)
    if unet is None or not hasattr(pipe, "encode_prompt"):
        return None
    denoiser, factor = Denoiser.from_diffusers(pipe), pipe.vae_scale_factor
    shape = (unet.config.in_channels, size[0] // factor, size[1] // factor)
    if min(shape[1:]) < WINDOW:
        return None
    probe = make_probe(denoiser, config=config, empty=empty_prompt(pipe, size) if config.guidance else None)

    @torch.no_grad()
    def score(prompt: str) -> float:
        ((prompt_score,), _) = score_prompts(probe, [encoded(pipe, [prompt], size)], shape, None)
        return prompt_score.value

    return score


# --- the LoRA report ------------------------------------------------------------------------------------------------
class PipelineModel:
    """Any text-to-image pipeline of a known family.

    Args:
        pipe: diffusers' own pipeline; LoRAs that are on it stay, and count as part of the model.
        size: (height, width) of the samples in pixels; none: the pipeline's own.
    """

    def __init__(self, pipe: DiffusionPipeline, size: tuple[int, int] | None = None) -> None:
        self.pipe, self._tools, self._switch = pipe, NEMOPipeline.from_pipe(pipe, size=size), LoraSwitch(pipe)
        self.shape: tuple[int, ...] = latent_shape(self._tools)
        self.shift = float(getattr(pipe.scheduler.config, "shift", None) or 1.0)
        # now: later a LoRA is in the network
        self.identity: dict[str, object] = {name: described(part) for name, part in components_of(pipe).items()}

    @property
    def backbone(self) -> torch.nn.Module:
        """UNet or transformer."""
        network: torch.nn.Module = self._tools._network
        return network

    def facts(self, path: str | Path) -> LoraFacts:
        """Of a file, with this model's weights for a DoRA."""
        return facts_of(path, BaseWeights.of_module(self.backbone))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """(n, 3, H, W) in [0, 1]."""
        with torch.no_grad():
            pixels = torch.cat([self._tools._adapter.decode(row).float().cpu() for row in latents.split(4)])
        return (pixels / 2 + 0.5).clamp(0, 1)

    def pieces(self, word: str) -> int:
        """Tokens of a word; 1 where the pipeline has no tokenizer."""
        tokenizer = getattr(self.pipe, "tokenizer", None)
        return 1 if tokenizer is None else len(tokenizer.tokenize(word))

    @contextmanager
    def lora(self, facts: LoraFacts) -> Iterator[Loading]:
        """Loads the file as it is, or what it says in names that diffusers reads, where diffusers refuses it."""
        note = ""
        try:
            try:
                self._switch.load(facts.path)
            except VitrineError as error:
                self._switch.unload()
                if facts.file is None:
                    raise refuse("LoRA", facts.path.name, "a LoRA of this model", facts.problem) from error
                lora = read_lora(facts.file, base=BaseWeights.of_module(self.backbone))
                with tempfile.TemporaryDirectory() as scratch:
                    self._switch.load(write_lora(Path(scratch) / "converted.safetensors", lora))
                reason = str(error).split("accepted:")[0].strip(" ;").split("\n")[0][:200]
                note = f"diffusers does not load the file itself ({reason}); "
                note += "measured is the same change in plain factors"
            yield self._loading(facts, note)
        finally:
            self._switch.unload()
            self._tools.maybe_free_model_hooks()

    @contextmanager
    def at(self, strength: float) -> Iterator[OnModel]:
        """The model with that LoRA at a strength; 0 is the model without it."""
        self._switch.set(strength)
        tools, adapter = self._tools, self._tools._adapter
        height, width = (side * adapter.factor for side in self.shape[1:])
        with tools._in_use(), torch.no_grad():
            yield OnModel(tools._denoiser(), partial(conditions, tools), adapter.empty((height, width)))

    def _loading(self, facts: LoraFacts, note: str) -> Loading:
        """Which of the file's layers are in the network now."""
        layers = modules_of(self.backbone).items()
        arrived = {path for path, module in layers if ADAPTER in getattr(module, "lora_A", ())}
        encoders = (getattr(self.pipe, name, None) for name in ("text_encoder", "text_encoder_2", "text_encoder_3"))
        text = sum(ADAPTER in getattr(m, "lora_A", ()) for e in encoders if e is not None for m in e.modules())
        wanted = set() if facts.file is None else set(facts.file.entries)
        missing = wanted - arrived
        if arrived - wanted and len(arrived) >= len(wanted):  # other names for the same layers, some of them fused
            missing = set()
        return Loading(
            "diffusers", len(wanted) - len(missing), len(wanted), tuple(sorted(missing)[:_NAMED]), text, note
        )
