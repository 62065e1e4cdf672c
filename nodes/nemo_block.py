"""NEMO nodes: the model without a prompt's neurons, and neurons as files."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..engine.io.file_names import safe_name
from ..engine.nemo import BlockConfig, NeuronSet
from ..engine.nemo.block import token_positions
from ..engine.nemo.neurons import parse_neurons
from .comfy import saved
from .comfy.nemo import LAYERS, baked, blocked, layers_of
from .comfy.panel_state import HIDDEN, marked
from .comfy.progress import text_on
from .nemo import CATEGORY
from .nemo_find import describe
from .sockets import NeuronsSocket, under_advanced

_FOLDER = "vitrine_neurons"


class NEMONeuronBlocker(io.ComfyNode):
    """A MODEL that samples with neurons blocked."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model and neurons in, model out."""
        return io.Schema(
            node_id="VitrineNEMONeuronBlocker",
            display_name="NEMO Neuron Blocker",
            category=CATEGORY,
            description="Multiplies neurons by a factor while sampling: 0 blocks recall for the prompts they were "
            "found for. It does not erase a picture: an adversarial embedding can bring it back.",
            search_aliases=[
                "block neurons", "unlearn", "anti memorization", "nemo", "stop copying",
                "stop the model copying a picture", "forget", "erase", "concept erasure", "copyright",
                "remove memorized picture", "blocked neuron",
            ],
            inputs=under_advanced(("tokens",), [
                io.Model.Input("model", tooltip="Other branches of the graph are not affected."),
                NeuronsSocket.Input("neurons", tooltip="From NEMO Find Neurons or Load Neurons, same model."),
                io.Float.Input("factor", default=0.0, min=-1.0, max=1.0, step=0.05, tooltip="0 blocks, 1 is off."),
                io.Combo.Input("branch", options=["both", "cond"], tooltip="cond leaves the negative prompt alone."),
                io.Float.Input("start", display_name="start_percent", default=0.0, min=0.0, max=1.0, step=0.01,
                               tooltip="When blocking begins, as a fraction of the run: 0 is its beginning, 1 its "
                                       "end."),
                io.Float.Input("end", display_name="end_percent", default=1.0, min=0.0, max=1.0, step=0.01,
                               tooltip="When blocking ends, as a fraction of the run: 0 is its beginning, 1 its end."),
                io.String.Input(
                    "tokens", default="", optional=True,
                    tooltip="Positions in the prompt where it acts, e.g. 3-5, 9 (of CLIP the first word is at 1); "
                    "empty: everywhere.",
                ),
                io.String.Input(
                    "spared", default="", multiline=True, optional=True,
                    tooltip="Neurons to leave alone: layer name and index, one a line; or press the button and click "
                            "them.",
                ),
            ]),
            outputs=[io.Model.Output(display_name="MODEL", tooltip="Sample with this one. LoRAs may follow.")],
            hidden=HIDDEN,
            has_intermediate_output=True,
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model: Any, neurons: NeuronSet, factor: float, branch: str, start: float, end: float, tokens: str = "",
        spared: str = "",
    ) -> io.NodeOutput:  # fmt: skip
        """Check the set against the model now, not in the middle of sampling."""
        config = BlockConfig(factor, branch, start, end, token_positions(tokens))
        left = neurons.without(parse_neurons(spared))
        if not len(neurons) or factor == 1:
            return io.NodeOutput(model)
        patched = blocked(model, left, config) if len(left) else model
        LAYERS.remember(cls.hidden, layers_of(model, neurons))
        return io.NodeOutput(patched, ui=marked({}, cls.hidden))


class NEMOBake(io.ComfyNode):
    """Blocked neurons as an ordinary weight patch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model and neurons in, patched model out."""
        return io.Schema(
            node_id="VitrineNEMOBake",
            display_name="NEMO Bake into Weights",
            category=CATEGORY,
            description="Zeroes the neurons' weights as an ordinary patch, for Save Checkpoint. A LoRA on the same "
            "layer brings them back; NEMO Neuron Blocker blocks them with LoRAs too.",
            search_aliases=[
                "prune neurons",
                "save unlearned model",
                "forget for good",
                "erase from model",
                "concept erasure",
            ],
            inputs=[
                io.Model.Input("model", tooltip="The model the neurons were found in."),
                NeuronsSocket.Input("neurons", tooltip="What to prune."),
                io.Float.Input("factor", default=0.0, min=-1.0, max=1.0, step=0.05, tooltip="0 prunes."),
            ],
            outputs=[io.Model.Output(display_name="MODEL", tooltip="With the patch; works in every core node.")],
        )

    @classmethod
    def execute(cls, model: Any, neurons: NeuronSet, factor: float) -> io.NodeOutput:
        """The patch contains only the layers concerned."""
        return io.NodeOutput(baked(model, neurons, factor))


class SaveNeurons(io.ComfyNode):
    """Write neurons to models/vitrine_neurons."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Neurons and a name in."""
        return io.Schema(
            node_id="VitrineSaveNeurons",
            display_name="Save Neurons",
            category=CATEGORY,
            description="Writes a JSON file with the neurons, the model's fingerprint and the search's report.",
            search_aliases=["export neurons"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            has_intermediate_output=True,  # the panel learns what to show on a run from the cache, too
            inputs=[
                NeuronsSocket.Input("neurons", tooltip="From NEMO Find Neurons."),
                io.String.Input("name", default="neurons", tooltip="File name without folder or ending."),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="The file written.")],
        )

    @classmethod
    def execute(cls, neurons: NeuronSet, name: str) -> io.NodeOutput:
        """An existing file of that name is replaced whole."""
        path = neurons.save(saved.folder(_FOLDER) / f"{safe_name(name)}.json")
        return io.NodeOutput(str(path), ui=text_on(f"{saved.shown(path)}\n{describe(neurons)}"))


class LoadNeurons(io.ComfyNode):
    """Read a NEURONS file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The list is read anew whenever the page refreshes."""
        files = saved.listed(_FOLDER, ".json")
        return io.Schema(
            node_id="VitrineLoadNeurons",
            display_name="Load Neurons",
            category=CATEGORY,
            description="Reads neurons from models/vitrine_neurons; a file of another model is refused when used.",
            search_aliases=["import neurons"],
            inputs=[io.Combo.Input("file", options=files or ["none saved yet"], tooltip="A saved .json file.")],
            outputs=[NeuronsSocket.Output(display_name="NEURONS", tooltip="As they were saved.")],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str) -> str:
        """Runs again when the file has changed."""
        return saved.changed(_FOLDER, file)

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        """Load; broken files are named."""
        return io.NodeOutput(NeuronSet.load(saved.path_of(_FOLDER, file)))


NODES = [NEMONeuronBlocker, NEMOBake, SaveNeurons, LoadNeurons]
