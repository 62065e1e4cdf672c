"""NEMO on a MODEL: blocking neurons while it samples, and baking them into its weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ...engine.errors import refuse
from ...engine.nemo import BlockConfig, NeuronSet, bake, block, held_by, value_sites
from ...engine.nemo.block import RunningForward
from ...engine.nemo.noise_similarity import probe_noise
from ...engine.network.condition import Condition
from ...engine.runtime.stored_weights import as_numbers
from ...engine.tracing.fingerprint import width_of
from . import compat_comfyui as core
from .forwards import Forward, around_forwards
from .model import PREFIX, backbone_of, checkpoint_weights, decode, fingerprint
from .own_patches import late_changes
from .page_routes import key_in, not_run, post
from .panel_state import PanelStates

_KEY = "vitrine.nemo"
LAYERS: PanelStates[list[dict[str, Any]]] = PanelStates()
"""What the panel of a *Block Copying Neurons (NEMO)* shows: see :func:`layers_of`."""


def blocked(model: Any, neurons: NeuronSet, config: BlockConfig) -> Any:
    """A clone whose forwards run with the neurons blocked. Hooks exist only inside each of its own forwards."""
    model_id = fingerprint(model)
    neurons.check(backbone_of(model), value_sites(backbone_of(model), "all"), model_id)

    def blocking(forward: Forward) -> AbstractContextManager:
        running = RunningForward(lengths=None if config.tokens is None else forward.prompt_lengths)
        running.update(config, forward.share, lambda: forward.positive_rows)
        return block(forward.network, neurons, config, running=running, fingerprint=model_id)

    return around_forwards(model, _KEY, blocking)


def layers_of(model: Any, neurons: NeuronSet) -> list[dict[str, Any]]:
    """What the page shows: address, width and the set's neurons of each layer of values, in the order they run.

    "holds" is what searches recorded of each neuron, in the neurons' order.
    """
    backbone, records = backbone_of(model), held_by(neurons)
    layers = []
    for site in value_sites(backbone, "all"):
        address, numbers = site.address, list(neurons.neurons.get(site.address, ()))
        holds = [records.get((address, number), []) for number in numbers]
        layers.append({"address": address, "width": width_of(backbone, site), "neurons": numbers, "holds": holds})
    return layers


def baked(model: Any, neurons: NeuronSet, factor: float | None) -> Any:
    """A clone with ordinary weight patches that scale the neurons' rows of what the MODEL's weights are.

    A factor of None is the neurons' own.

    These are the checkpoint's under the MODEL's own patches, in their order. Weights that carry another clone's LoRA at
    the moment are read from ComfyUI's backup: it must not leak in here.
    """
    clone, network, originals = model.clone(), backbone_of(model), checkpoint_weights(model)
    for name in _weights_of(model, neurons):
        key, old = PREFIX + name, as_numbers(originals.get(name, network.get_parameter(name)))
        if key in late_changes(model):
            remedy = "put this node before Apply Person (W2W), or use Block Copying Neurons (NEMO)"
            raise refuse("model", f"{name} of a late model", "weights that no forward changes", remedy)
        if key in model.patches:
            originals[name] = core.calculate_weight(model.patches[key], old.float().clone(), key)
    changed = bake(network, neurons, factor, fingerprint(model), originals, as_patch=True)
    patches = {}
    for name, value in changed.items():
        old = originals.get(name, network.get_parameter(name))  # a state dict has scaled weights without their scales
        patches[PREFIX + name] = (value.to(old.device) - as_numbers(old).to(value.dtype),)
    accepted = clone.add_patches(patches, 1.0)
    assert set(accepted) == set(patches)
    return clone


def _weights_of(model: Any, neurons: NeuronSet) -> list[str]:
    """Names of the parameters that a set's neurons are rows of."""
    network = backbone_of(model)
    paths = [site.path for site in value_sites(network, "all") if site.address in neurons.neurons]
    modules = [(path, network.get_submodule(path)) for path in dict.fromkeys(paths)]
    return [f"{path}.{name}" for path, module in modules for name, _ in module.named_parameters()]


@torch.no_grad()
def previews(model: Any, vae: Any, probe: Any, cond: Condition, shape: tuple[int, int, int]) -> torch.Tensor:
    """IMAGE (S, H, W, 3): the clean one-step prediction of each of the probe's seeds."""
    noise = probe_noise(probe.config, shape).to(model.load_device)
    clean = probe.denoiser.predict(noise, probe.t, cond.take(torch.zeros(len(noise), dtype=torch.long))).x0
    return decode(model, vae, clean)


async def _neurons(asked: dict[str, Any], request: Any) -> dict[str, Any]:
    layers = LAYERS.find(key_in(asked))
    if layers is None:
        raise not_run()
    return {"layers": layers}


def register() -> None:
    """Answer the page, where there is a server."""
    post("/vitrine/neurons", _neurons)
