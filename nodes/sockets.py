"""Vitrine's own socket types. Other packs may use them by name."""

from comfy_api.latest import io

ActivationsSocket = io.Custom("VITRINE_ACTIVATIONS")
"""A ``vitrine.engine.activations.Activations``."""

RecorderSocket = io.Custom("VITRINE_RECORDER")
"""A ``vitrine.nodes.comfy.recording.Recorder``: filled while the model it belongs to is sampled."""

NeuronsSocket = io.Custom("VITRINE_NEURONS")
"""A ``vitrine.engine.nemo.NeuronSet``."""

NeuronStatisticsSocket = io.Custom("VITRINE_NEURON_STATISTICS")
"""A ``vitrine.engine.nemo.NeuronStatistics``."""

FeaturePresetSocket = io.Custom("VITRINE_FEATURE_PRESET")
"""A ``vitrine.engine.activations.preset_files.FeaturePreset``."""

W2WSpaceSocket = io.Custom("VITRINE_W2W_SPACE")
"""A ``vitrine.engine.w2w.WeightSpace`` or ``DeltaSpace``."""

W2WModelSocket = io.Custom("VITRINE_W2W_MODEL")
"""A ``vitrine.engine.w2w.W2WModel``: one or more models of a space."""
