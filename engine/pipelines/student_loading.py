"""Loading a distilled student into a pipeline, and taking it out again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..emd import ONE_STEP, StudentPreset, check_base, check_network, read_student
from ..emd.published_students import one_step_of
from ..errors import refuse
from .shared import SharedPipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin


class StudentLoading(SharedPipeline):
    """A pipeline that takes students: LoRAs, or whole networks."""

    pipe: DiffusionPipeline

    def load_student(
        self, path: str | Path, base: str = "", adapter_name: str = "generator", *,
        preset: str | StudentPreset | None = None,
    ) -> StudentPreset:  # fmt: skip
        """Load a student, a LoRA in any names that diffusers reads or a whole network, and return its preset.

        Args:
            base: name of this model; a student of another one is refused.
            adapter_name: of a LoRA; one of that name that was loaded before gives way.
            preset: for files without one whose name does not tell: a published student's name in
                :data:`vitrine.engine.emd.ONE_STEP`, or a preset.
        """
        if isinstance(preset, str):
            if preset not in ONE_STEP:
                raise refuse("preset", preset, sorted(ONE_STEP), "or pass a StudentPreset")
            preset = ONE_STEP[preset]
        pipe = self._adapter.pipe
        read, tensors = read_student(path, preset, any_names=True, otherwise=one_step_of(path))
        check_base(read, base)
        check_network(read, self._network)
        if any(".lora" in key or key.startswith("lora_") for key in tensors):
            if not hasattr(pipe, "load_lora_weights"):
                shown, accepted = f"a LoRA for {type(pipe).__name__}", "a pipeline that loads LoRAs"
                raise refuse("student", shown, accepted, "load a student that is a whole network")
            if adapter_name in getattr(self._network, "peft_config", {}):
                self._network.delete_adapters(adapter_name)
            pipe.load_lora_weights(tensors, adapter_name=adapter_name)
        else:
            self._load_whole(tensors, Path(path).name)
        return read

    def _load_whole(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        net = copy.deepcopy(self._network)  # this one may be shared with the pipeline that ``from_pipe`` took it from
        shapes = {key: value.shape for key, value in net.state_dict().items()}
        keys = shapes.keys() | tensors.keys()
        differing = [key for key in keys if key not in tensors or tensors[key].shape != shapes.get(key)]
        if differing:
            shown, accepted = f"{len(differing)} tensors of {name} differ", "the tensors of this pipeline's network"
            raise refuse("student network", shown, accepted, "load the matching base")
        net.load_state_dict(tensors)
        self._take(net)

    def _take(self, network: ModelMixin) -> None:
        """Sample with another network; a wrapped pipeline keeps its own."""
        pipe = self._adapter.pipe
        if pipe is not self:
            self.pipe = pipe = copy.copy(pipe)
        pipe.register_modules(**{self._adapter.family.component: network})

    def unload_student(self, network: ModelMixin) -> None:
        """Sample with ``network`` again, which was this pipeline's ``network`` before a student was loaded."""
        if self._network is not network:
            self._take(network)
        elif getattr(network, "peft_config", None):
            self._adapter.pipe.unload_lora_weights()
