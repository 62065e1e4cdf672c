"""The copy check for any text-to-image pipeline of diffusers, with or without a LoRA to take off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..activations.picture_latents import to_pixels
from ..diffusion.denoiser import Denoiser
from ..diffusion.noise import generators
from ..errors import refuse
from ..io.files import named, refuse_pickle
from ..io.picture_files import PICTURES, open_picture, pictures_in
from ..jobs.digests import Files
from ..nemo import ProbeConfig, make_probe, score_prompts
from ..nemo.check import CheckConfig, CopyCheck, Instruments, Pictures, check_copies
from ..nemo.check_page import write_check
from ..runtime.footprint import memory_bytes, rows_within
from ..runtime.progress import Progress, silent
from .adapter import network_of
from .components import components_of
from .conventions import accepted_by
from .prompt_encoding import empty_prompt, encoded

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ADAPTER = "vitrine_copy_check"
_SHARE = 2
"""Of a budget: one sampling run may take its half."""


def copy_check(
    pipe: DiffusionPipeline, prompts: Sequence[str], folder: str | Path, *,
    pictures: str | Path | Sequence[str | Path] = (), lora: str | Path | None = None,
    config: CheckConfig | None = None, probe: ProbeConfig | None = None,
    tau: float | None = None, labels: Sequence[str] = (),
    describe: Callable[[torch.Tensor], torch.Tensor] | None = None, memory: int | str = "2GB",
    progress: Progress = silent, shown: int = 50, **sampling: Any,
) -> CopyCheck:  # fmt: skip
    """Which prompts come back as copies, how often, where in the picture, and of which training picture.

    The folder gets ``copies.html``, ``copies.csv`` and the nearest sample of each prompt. The same call resumes where
    an interrupted one stopped; with other settings it is refused.

    Args:
        pipe: any text-to-image pipeline that takes ``prompt``, ``generator`` and ``output_type="pt"``. Scores are
            measured where it has a UNet: Stable Diffusion 1.x, 2.x and SDXL.
        pictures: the training pictures, or their folder; without them samples of a prompt are compared with each other.
        lora: a .safetensors file, loaded for this check; the model without it says which distance is usual.
        config: seeds, and captions that have nothing to do with the pictures; needed without a LoRA.
        probe, tau: of NeMo's score, and the threshold calibrated with it; without tau there is no verdict.
        describe: (n, 3, H, W) in [0, 1] -> (n, D), a copy descriptor of your own.
        memory: what a sampling run may need beyond the models; it decides how many seeds are sampled at once.
        shown: prompts with pictures on the page.
        sampling: as in a call of the pipeline: num_inference_steps, guidance_scale, height, width ...
    """
    _refuse_unknown(pipe, sampling)
    paths = _paths(pictures)
    with _freed(pipe), _adapter(pipe, lora) as adapter:
        sampler = _Sampler(pipe, adapter, sampling)
        side = sampler.size
        read = (lambda i: _picture(paths[i], side)) if paths else None
        files = Pictures([p.name for p in paths], read, Files(paths))
        scores = _scores(pipe, side, probe or ProbeConfig())
        identity = {
            **components_of(pipe), "LoRA": None if lora is None else Path(lora), "sampling": sampling,
            "probe": probe or ProbeConfig(),
        }  # fmt: skip
        rows = rows_within(memory_bytes(memory) // _SHARE, sampler.short, (config or CheckConfig()).seeds)
        instruments = Instruments(sampler, sampler.steps, rows, lora is not None, scores, describe, identity)
        check = check_copies(list(prompts), folder, instruments, files, config or CheckConfig(),
                             labels=labels, tau=tau, progress=progress)  # fmt: skip
    write_check(folder, check, files, shown)
    return check


class _Sampler:
    """Calls a pipeline as :data:`~vitrine.engine.nemo.check.Sample` wants it."""

    def __init__(self, pipe: DiffusionPipeline, adapter: _Adapter | None, sampling: Mapping[str, Any]) -> None:
        self.pipe, self._adapter, self._sampling = pipe, adapter, dict(sampling)
        default = accepted_by(type(pipe))["num_inference_steps"].default
        self.steps = int(sampling.get("num_inference_steps", default))

    @property
    def backbone(self) -> Any:
        """UNet or transformer."""
        return network_of(self.pipe)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the samples."""
        side = getattr(self.backbone.config, "sample_size", None) or getattr(self.pipe, "default_sample_size", 64)
        height, width = (side, side) if isinstance(side, int) else list(side or ())[-2:]
        factor = self.pipe.vae_scale_factor
        return self._sampling.get("height", height * factor), self._sampling.get("width", width * factor)

    def short(self) -> torch.Tensor:
        """One picture in one step, to see what a row takes."""
        return self._call("", [0], {"num_inference_steps": 1})

    def __call__(self, prompt: str, seeds: Sequence[int], bare: bool, after: Callable[[int], None]) -> torch.Tensor:
        def step_end(pipe: DiffusionPipeline, step: int, t: Any, values: dict[str, Any]) -> dict[str, Any]:
            after(step + 1)
            return values

        hook = "callback_on_step_end" in accepted_by(type(self.pipe))
        extra = {"callback_on_step_end": step_end} if hook else {}
        if self._adapter is None or not bare:
            return self._call(prompt, seeds, extra)
        with self._adapter.off():
            return self._call(prompt, seeds, extra)

    def _call(self, prompt: str, seeds: Sequence[int], extra: Mapping[str, Any]) -> torch.Tensor:
        settings = self._sampling | dict(extra)
        images: torch.Tensor = self.pipe(
            [prompt] * len(seeds), generator=generators(seeds), output_type="pt", **settings
        ).images
        return images


class _Adapter:
    """A LoRA loaded next to those already there."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.pipe, self.others = pipe, list(pipe.get_active_adapters())
        self._untouched = not any(pipe.get_list_adapters().values())

    def load(self, path: Path) -> None:
        """Load and switch on."""
        with named(path, "LoRA", "a LoRA of this model, as safetensors", "check the file"):
            self.pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=ADAPTER)
        if ADAPTER not in self.pipe.get_active_adapters():
            raise refuse("LoRA", path.name, "a LoRA of this model", "none of its layers fits")
        self.pipe.set_adapters([*self.others, ADAPTER])

    def unload(self) -> None:
        """The pipeline as it was before :meth:`load`."""
        if self._untouched:
            self.pipe.unload_lora_weights()
            return
        self.pipe.delete_adapters(ADAPTER)
        if self.others:
            self.pipe.set_adapters(self.others)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was before."""
        if self.others:
            self.pipe.set_adapters(self.others)
        else:
            self.pipe.disable_lora()
        try:
            yield
        finally:
            self.pipe.enable_lora()
            self.pipe.set_adapters([*self.others, ADAPTER])


@contextmanager
def _adapter(pipe: DiffusionPipeline, path: str | Path | None) -> Iterator[_Adapter | None]:
    if path is None:
        yield None
        return
    path = Path(path)
    refuse_pickle(path, "LoRA")
    if not path.is_file():
        raise refuse("LoRA", path.name, "an existing .safetensors file", "check the path")
    adapter = _Adapter(pipe)
    try:
        adapter.load(path)
        yield adapter
    finally:
        adapter.unload()


@contextmanager
def _freed(pipe: DiffusionPipeline) -> Iterator[None]:
    """Models that offloading fetched go back at the end: scores run the network outside of the pipeline's call."""
    try:
        yield
    finally:
        pipe.maybe_free_model_hooks()


def _scores(
    pipe: DiffusionPipeline, size: tuple[int, int], probe: ProbeConfig
) -> Callable[[str], Mapping[str, float | None]] | None:
    """Scores of a prompt, where the pipeline has a UNet whose text we know how to encode."""
    unet = getattr(pipe, "unet", None)
    if unet is None or not hasattr(pipe, "encode_prompt"):
        return None
    denoiser, factor = Denoiser.from_diffusers(pipe), pipe.vae_scale_factor
    shape = (unet.config.in_channels, size[0] // factor, size[1] // factor)
    instrument = make_probe(denoiser, config=probe, empty=empty_prompt(pipe, size) if probe.guidance else None)

    @torch.no_grad()
    def scores(prompt: str) -> Mapping[str, float | None]:
        ((score,), _) = score_prompts(instrument, [encoded(pipe, [prompt], size)], shape, None)
        return {"nemo": score.value}

    return scores


def _refuse_unknown(pipe: DiffusionPipeline, sampling: Mapping[str, Any]) -> None:
    accepted = sorted(set(accepted_by(type(pipe))) - {"self", "prompt", "generator", "output_type"})
    unknown = sorted(set(sampling) - set(accepted))
    if unknown:
        raise refuse("arguments", unknown, accepted, f"as {type(pipe).__name__} takes them")


def _paths(pictures: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files, in the order of their names for a folder."""
    if not isinstance(pictures, (str, Path)):
        return [Path(p) for p in pictures]
    folder = Path(pictures)
    paths = pictures_in(folder)
    if not paths:
        raise refuse("pictures", folder.name, f"a folder with {', '.join(PICTURES)}", "check the path")
    return paths


def _picture(path: Path, size: tuple[int, int]) -> torch.Tensor:
    """(3, H, W) in [0, 1], cropped around its middle to the samples' proportions, as trainers do."""
    image = open_picture(path)
    scale = min(image.width / size[1], image.height / size[0])
    width, height = min(image.width, round(size[1] * scale)), min(image.height, round(size[0] * scale))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels: torch.Tensor = to_pixels(image.crop((left, top, left + width, top + height)), None, 1)
    return (pixels[0] + 1) / 2
