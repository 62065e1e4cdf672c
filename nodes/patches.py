"""Active Patches: look at a MODEL before you trust a picture."""

from __future__ import annotations

from comfy_api.latest import io

from ..engine.network.patches import as_text
from .comfy.graph_files import files_before
from .comfy.patches import patches_of
from .comfy.progress import text_on


class ActivePatches(io.ComfyNode):
    """Lists what is patched on a MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """MODEL in; the same MODEL, a text and a number out."""
        return io.Schema(
            node_id="VitrineActivePatches",
            display_name="Active Patches",
            category="Vitrine",
            description="Lists every change that is applied to a MODEL: LoRAs and other weight patches, blocked "
            "neurons, replaced sampling objects, attention patches, wrappers. The MODEL passes through "
            "unchanged.",
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            inputs=[io.Model.Input("model", tooltip="Any MODEL, from any chain of nodes.")],
            outputs=[
                io.Model.Output(display_name="MODEL", tooltip="The same object, untouched."),
                io.String.Output(
                    display_name="report",
                    tooltip="One line for each kind of patch, then the files of the nodes before.",
                ),
                io.Int.Output(display_name="count", tooltip="How many kinds of patch; 0 is an unchanged checkpoint."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: io.Model.Type) -> io.NodeOutput:
        """Read the patcher and write the list."""
        patches = patches_of(model)
        files = files_before(cls.hidden, "model")
        text = "\n".join([as_text(patches, "MODEL"), *(f"file: {line}" for line in files)])
        return io.NodeOutput(model, text, len(patches), ui=text_on(text))


NODES = [ActivePatches]
