"""Pipelines that are diffusers pipelines themselves, made from the components of a loaded one."""

from __future__ import annotations

import inspect
import json
from typing import Any, ClassVar

from diffusers import AutoencoderTiny, DiffusionPipeline, ModelMixin, StableDiffusionPipeline

from ..errors import refuse
from ..runtime.compat_diffusers import follow, parts_of_class, types_of_parts
from .adapter import reads_sizes
from .shared import SharedPipeline
from .wrapping import whole


class FromParts(SharedPipeline, DiffusionPipeline):
    """Base of these pipelines; comes before the stock class among a class's bases."""

    _stock: ClassVar[str | None] = None
    """Name of the diffusers class whose parts these are, where it is not a base."""
    _forms: ClassVar[dict[str, type[SharedPipeline]]] = {}
    """What ``from_pipe`` makes of another kind of pipeline: "transformer", "xl", or "other" than text to image."""

    def to_json_string(self) -> str:
        """diffusers' index of what is saved, with the stock class's name: a saved folder loads without this package."""
        index = json.loads(super().to_json_string())
        bases = (base for base in type(self).__mro__ if base.__module__.startswith("diffusers.pipelines."))
        index["_class_name"] = self._stock or next(bases).__name__
        return json.dumps(index, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Any:
        """A pipeline of this class around the components of another, each as it is: same object, dtype and device.

        Of SDXL, a transformer of a known family, and for some classes image to image, inpainting and ControlNets, the
        class for such a model is made. diffusers' own ``from_pipe`` casts the shared modules to float32 unless asked
        otherwise, and so changes the pipeline they came from.

        Args:
            kwargs: components or settings of ``__init__`` to use instead; ``torch_dtype`` casts all modules, which the
                other pipeline then shares.
        """
        pipeline = whole(pipeline)
        form = cls._forms.get(_kind(pipeline))
        return cls._from_parts(pipeline, **kwargs) if form is None else form.from_pipe(pipeline, **kwargs)

    @classmethod
    def _from_parts(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Any:
        dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
        modules, settings, optional = parts_of_class(cls)
        source = {**pipeline.components, **{k: v for k, v in pipeline.config.items() if k in settings}}
        chosen = {k: v for k, v in source.items() if k in modules | settings} | kwargs
        cls._refuse_strangers(type(pipeline).__name__, chosen, modules)
        cls._refuse_larger(pipeline, modules)
        made = cls(**{name: None for name in optional & modules} | chosen)
        follow(made, pipeline)
        return made if dtype is None else made.to(dtype)

    @classmethod
    def _refuse_strangers(cls, name: str, chosen: dict[str, Any], modules: set[str]) -> None:
        kinds, parameters = types_of_parts(cls), inspect.signature(cls.__init__).parameters
        may_be_none = parts_of_class(cls)[2]
        if "text_encoder_2" in modules and chosen.get("unet") is not None and not reads_sizes(chosen["unet"]):
            raise refuse("pipeline", name, "one of SDXL", f"{cls.__name__} is for another model family")
        for key in sorted(modules):
            value, optional = chosen.get(key), parameters[key].default is not inspect.Parameter.empty
            if value is None and not optional and key not in may_be_none:
                accepted = f"a pipeline with {', '.join(sorted(modules - may_be_none))}"
                raise refuse("pipeline", f"{name} without {key}", accepted, f"load a pipeline that {cls.__name__} fits")
            expected = [k for k in kinds.get(key, ()) if isinstance(k, type)]
            expected += [AutoencoderTiny] if key == "vae" else []
            if isinstance(value, ModelMixin) and expected and not isinstance(value, tuple(expected)):
                wanted = " or ".join(k.__name__ for k in expected)
                raise refuse(key, type(value).__name__, wanted, f"{cls.__name__} is for another model family")

    @classmethod
    def _refuse_larger(cls, pipeline: DiffusionPipeline, modules: set[str]) -> None:
        """SDXL instead of Stable Diffusion: the parts fit, but its network waits for what the second encoder says."""
        parts = pipeline.components
        left = sorted(k for k in set(parts) - modules if k.startswith("text_encoder") and parts[k] is not None)
        if left and "text_encoder" in modules:
            shown = f"{type(pipeline).__name__} with {', '.join(left)}"
            accepted = "a pipeline with one text encoder"
            raise refuse("pipeline", shown, accepted, f"{cls.__name__} is for another model family")


def _kind(pipeline: DiffusionPipeline) -> str:
    unet = getattr(pipeline, "unet", None)
    if getattr(pipeline, "transformer", None) is not None:
        return "transformer"
    if unet is not None and reads_sizes(unet):
        return "xl"
    return "" if isinstance(pipeline, (StableDiffusionPipeline, FromParts)) else "other"
