"""Vitrine's own socket types, which other packs may use by name; and which inputs a first-time user skips."""

from collections.abc import Sequence
from copy import copy
from typing import Any

from comfy_api.latest import io

ActivationsSocket = io.Custom("VITRINE_ACTIVATIONS")
"""A ``vitrine.engine.activations.Activations``."""

RecorderSocket = io.Custom("VITRINE_RECORDER")
"""A ``vitrine.nodes.comfy.recording.Recorder``: filled while the model it belongs to is sampled."""

NeuronsSocket = io.Custom("VITRINE_NEURONS")
"""A ``vitrine.engine.nemo.NeuronSet``."""

NEMOCalibrationSocket = io.Custom("VITRINE_NEMO_CALIBRATION")
"""A ``vitrine.engine.nemo.Calibration``."""

FeaturePresetSocket = io.Custom("VITRINE_FEATURE_PRESET")
"""A ``vitrine.engine.activations.presets.FeaturePreset``."""

W2WSpaceSocket = io.Custom("VITRINE_W2W_SPACE")
"""A ``vitrine.engine.w2w.WeightSpace`` or ``DeltaSpace``."""

W2WModelSocket = io.Custom("VITRINE_W2W_MODEL")
"""A ``vitrine.engine.w2w.W2WModel``: one or more models of a space."""


def under_advanced(names: Sequence[str], inputs: Sequence[Any]) -> list[Any]:
    """The same inputs in the same order, those named behind *Show advanced inputs*.

    Nodes 2.0 hides them until asked; the classic page shows all. The help page speaks of them under "Advanced".

    Args:
        names: of widgets; a socket is always seen.
        inputs: of a schema. Those shared with other nodes are left as they are.

    Raises:
        ValueError: A name that no input has.
    """
    unknown = set(names) - {entry.id for entry in inputs}
    if unknown:
        raise ValueError(
            f"no input is called {sorted(unknown)}; there are {[entry.id for entry in inputs]}: correct it"
        )
    marked = [copy(entry) for entry in inputs]
    for entry in marked:
        entry.advanced = entry.advanced or entry.id in names or None
    return marked
