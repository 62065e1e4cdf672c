"""NEMO nodes: the model without a prompt's neurons, what blocking did, and neurons as files."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.io.file_names import safe_name
from ..engine.nemo import (
    AttackConfig,
    BlockConfig,
    Copies,
    NeuronSet,
    ProbeConfig,
    VerifyConfig,
    make_probe,
    picture_distance,
    verify,
)
from ..engine.nemo.block import token_positions
from ..engine.nemo.neurons import parse_neurons
from .captions import captioned, enlarged
from .comfy import saved
from .comfy.carried import with_foreign
from .comfy.conditioning import condition_of
from .comfy.model import allow_gradients, blank_latents, denoiser_of, differentiable, fingerprint, scaled_latents
from .comfy.nemo import LAYERS, baked, blocked, layers_of
from .comfy.panel_state import HIDDEN, marked
from .comfy.pictures import as_pictures, resized
from .comfy.progress import progress, text_on
from .config_inputs import input_of, inputs_of, settings_from
from .nemo import CATEGORY, PROBE, describe, shape_of
from .sockets import NeuronsSocket, under_advanced

_FOLDER = "vitrine_neurons"
SIDE = 512
"""Least pixels of each of the three squares side by side."""
SHOWN = 4
"""Samples in a square."""
TITLES = (
    "The training picture",
    "Untouched: {copies} of {count} are copies",
    "With the neurons off: {copies} of {count}",
)


class NEMONeuronBlocker(io.ComfyNode):
    """A MODEL that samples with neurons blocked."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model and neurons in, model out."""
        return io.Schema(
            node_id="VitrineNEMONeuronBlocker",
            display_name="Block Copying Neurons (NEMO)",
            category=CATEGORY,
            description="Multiplies neurons by a factor while sampling, which blocks recall for the prompts they were "
            "found for. It does not erase a picture: an adversarial embedding can bring it back.",
            search_aliases=[
                "block neurons", "unlearn", "anti memorization", "nemo", "stop copying",
                "stop the model copying a picture", "forget", "erase", "concept erasure", "copyright",
                "remove memorized picture", "blocked neuron",
            ],
            inputs=under_advanced(("tokens",), [
                io.Model.Input("model", tooltip="Other branches of the graph are not affected."),
                NeuronsSocket.Input("neurons", tooltip="From Find Copying Neurons (NEMO) or Load Neurons, same model."),
                *inputs_of(BlockConfig, "factor", "branch", "start_percent", "end_percent"),
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
        cls,
        model: Any,
        neurons: NeuronSet,
        factor: float,
        tokens: str = "",
        spared: str = "",
        **options: Any,
    ) -> io.NodeOutput:
        """Check the set against the model now, not in the middle of sampling."""
        config = settings_from(BlockConfig, options, factor=factor or None, tokens=token_positions(tokens))
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
            display_name="Bake Blocking into Weights (NEMO)",
            category=CATEGORY,
            description="Scales the neurons' weights as an ordinary patch, for Save Checkpoint. A LoRA on the same "
            "layer brings them back; Block Copying Neurons (NEMO) blocks them with LoRAs too.",
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
                *inputs_of(BlockConfig, "factor"),
            ],
            outputs=[io.Model.Output(display_name="MODEL", tooltip="With the patch; works in every core node.")],
        )

    @classmethod
    def execute(cls, model: Any, neurons: NeuronSet, factor: float) -> io.NodeOutput:
        """The patch contains only the layers concerned."""
        return io.NodeOutput(baked(model, neurons, factor or None))


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
                NeuronsSocket.Input("neurons", tooltip="From Find Copying Neurons (NEMO)."),
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


class NEMOVerify(io.ComfyNode):
    """An honest verdict on a set of neurons."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, prompt and neurons in; report and the adversarial conditioning out."""
        return io.Schema(
            node_id="VitrineNEMOVerify",
            display_name="Verify Blocking (NEMO)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Scores blocked neurons on seeds the search never saw. With the memorized picture it also "
            "tries to bring it back by optimising the prompt's embedding, as an attacker would.",
            search_aliases=["check blocking", "adversarial embedding", "dori", "does it hold"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input("model", tooltip="The untouched model: the neurons are blocked here."),
                io.Conditioning.Input("positive", tooltip="The prompt the neurons were found for."),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                NeuronsSocket.Input("neurons", tooltip="From Find Copying Neurons (NEMO), same model."),
                *inputs_of(VerifyConfig, "tau"),
                *PROBE,
                *inputs_of(VerifyConfig, "seed"),
                input_of(AttackConfig, "steps", "attack_steps"),
                io.Latent.Input(
                    "reference",
                    optional=True,
                    tooltip="The memorized picture, or an unblocked sample, as a latent: connect it to try the attack.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="report", tooltip="Scores and what they mean, in words."),
                io.Boolean.Output(display_name="seeds differ", tooltip="True if other seeds no longer agree."),
                io.Conditioning.Output(
                    display_name="adversarial",
                    tooltip="Sample the blocked model with it and look (the prompt without a reference).",
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: list,
        latent: dict,
        neurons: NeuronSet,
        attack_steps: int,
        reference: dict | None = None,
        **options: Any,
    ) -> io.NodeOutput:
        """Interrupt works between two steps of the attack."""
        blank = blank_latents(model, latent)[:1]
        probe = make_probe(denoiser_of(model), "all", settings_from(ProbeConfig, options))
        cond = condition_of(model, positive, blank)
        picture = None
        if reference is not None and attack_steps:
            picture = scaled_latents(model, reference)[:1]
            picture = picture[:, :, 0] if picture.ndim == 5 else picture
        with torch.inference_mode(False), differentiable():  # nodes run in inference mode, where there are no gradients
            if picture is not None:
                allow_gradients(model)
            verdict = verify(
                probe,
                cond.to(model.load_device, copy=True),
                neurons,
                shape_of(blank),
                settings_from(VerifyConfig, options, attack=AttackConfig(steps=attack_steps)),
                reference=None if picture is None else picture.clone(),
                fingerprint=fingerprint(model),
                progress=progress(model),
            )
        adversarial = positive
        if verdict.embedding is not None and verdict.embedding.text is not None:
            adversarial = [[verdict.embedding.text.cpu(), positive[0][1]]]
        text = with_foreign(verdict.text(), positive)
        differ = verdict.untouched.memorized and not verdict.blocked.memorized
        return io.NodeOutput(text, differ, adversarial, ui=text_on(text))


class NEMOCompareCopies(io.ComfyNode):
    """Did blocking end the copies."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Pictures before and after, the training picture, ordinary pictures in; verdict and comparison out."""
        return io.Schema(
            node_id="VitrineNEMOCompareCopies",
            display_name="Compare Copies (NEMO)",
            category=CATEGORY,
            description="Shows the training picture, samples without blocking and samples with it side by side, and "
            "says in a sentence how many of them are copies.",
            search_aliases=["before and after", "did it help", "still a copy", "verdict", "compare copies", "nemo"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Image.Input("before", tooltip="Samples of the untouched model."),
                io.Image.Input("after", tooltip="Samples with the neurons blocked, of the same seeds."),
                io.Image.Input("training_picture", tooltip="The picture that must not come back."),
                io.Image.Input(
                    "ordinary",
                    tooltip="Pictures of other subjects of the model's kind, eight or more: how far they "
                    "are from the training picture says what is usual.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="verdict", tooltip="How many are copies, in a sentence."),
                io.Image.Output(display_name="side by side", tooltip="Training picture, samples before and after."),
                io.Int.Output(display_name="copies", tooltip="Samples with neurons blocked that are still copies."),
            ],
        )

    @classmethod
    def execute(
        cls, before: torch.Tensor, after: torch.Tensor, training_picture: torch.Tensor, ordinary: torch.Tensor
    ) -> io.NodeOutput:
        """``Copies`` of pictures at the size of the first sample."""
        before = as_pictures(before, "before")
        others = (("after", after), ("training_picture", training_picture), ("ordinary", ordinary))
        after, reference, usual = (resized(as_pictures(image, what), before) for what, image in others)
        compared = [x.movedim(-1, 1) for x in (before, after, usual)]
        distances = [picture_distance(x, reference[:1].movedim(-1, 1)) for x in compared]
        copies = Copies(*distances)
        text, picture = copies.sentence(), side_by_side(reference, before, after, copies)
        shown = ui.PreviewImage(picture, cls=cls).as_dict() | text_on(text).as_dict()
        return io.NodeOutput(text, picture, copies.copied[1], ui=shown)


def side_by_side(reference: torch.Tensor, before: torch.Tensor, after: torch.Tensor, copies: Copies) -> torch.Tensor:
    """(1, H, W, 3): three squares under their titles, of samples the first four, two by two."""
    squares = [reference[:1], _two_by_two(before), _two_by_two(after)]
    counts = (0, *copies.copied)
    names = [t.format(copies=n, count=len(copies.blocked)) for t, n in zip(TITLES, counts, strict=True)]
    size = max(SIDE, *(s.shape[1] for s in squares))
    parts = [captioned(_square(s, size), [name], line=32) for s, name in zip(squares, names, strict=True)]
    margin = torch.ones_like(parts[0][:, :, :8])
    return torch.cat([parts[0], margin, parts[1], margin, parts[2]], 2)


def _two_by_two(pictures: torch.Tensor) -> torch.Tensor:
    """(1, 2 H, 2 W, 3); the only picture where there is one, the last repeated where there are fewer than four."""
    if len(pictures) == 1:
        return pictures
    shown = [pictures[min(k, len(pictures) - 1)] for k in range(SHOWN)]
    return torch.cat([torch.cat(shown[:2], 1), torch.cat(shown[2:], 1)], 0)[None]


def _square(pictures: torch.Tensor, size: int) -> torch.Tensor:
    """Pictures of that height, small ones with their pixels as squares."""
    large = enlarged(pictures, size)
    scale = size / large.shape[1]
    if scale == 1:
        return large
    return torch.nn.functional.interpolate(large.movedim(-1, 1), scale_factor=scale, mode="area").movedim(1, -1)


NODES: list[type[io.ComfyNode]] = [NEMONeuronBlocker, NEMOBake, SaveNeurons, LoadNeurons, NEMOVerify, NEMOCompareCopies]
