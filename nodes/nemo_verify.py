"""NEMO Verify: does blocking hold on other seeds and against an optimised embedding."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..engine.nemo import AttackConfig, NeuronSet, ProbeConfig, VerifyConfig, make_probe, verify
from .comfy.conditioning import condition_of
from .comfy.model import allow_gradients, blank_latents, denoiser_of, differentiable, fingerprint, scaled_latents
from .comfy.progress import progress, text_on
from .nemo import CATEGORY, INDEX, SEEDS, TAU, shape_of
from .sockets import NeuronsSocket


class NEMOVerify(io.ComfyNode):
    """An honest verdict on a set of neurons."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, prompt and neurons in; report and the adversarial conditioning out."""
        return io.Schema(
            node_id="VitrineNEMOVerify",
            display_name="NEMO Verify",
            category=CATEGORY,
            description="Scores blocked neurons on seeds the search never saw. With the memorized picture it also "
            "tries to bring it back by optimising the prompt's embedding, as an attacker would.",
            search_aliases=["check blocking", "adversarial embedding", "dori", "does it hold"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input("model", tooltip="The untouched model: the neurons are blocked here."),
                io.Conditioning.Input("positive", tooltip="The prompt the neurons were found for."),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                NeuronsSocket.Input("neurons", tooltip="From NEMO Find Neurons, same model."),
                TAU,
                SEEDS,
                INDEX,
                io.Int.Input("seed", default=101, min=0, max=2**31, tooltip="Of the noises; the search uses 1."),
                io.Int.Input("attack_steps", default=50, min=0, max=1000, tooltip="Adam steps; 50 is a fair probe."),
                io.Latent.Input(
                    "reference", optional=True,
                    tooltip="The memorized picture, or an unblocked sample, as a latent: connect it to try the attack.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="report", tooltip="Scores and what they mean, in words."),
                io.Boolean.Output(display_name="seeds differ", tooltip="True if other seeds no longer agree."),
                io.Conditioning.Output(
                    display_name="adversarial", tooltip="Sample the blocked model with it and look (the prompt without "
                    "a reference).",
                ),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model: Any, positive: list, latent: dict, neurons: NeuronSet, tau: float, seeds: int, timestep_index: int,
        seed: int, attack_steps: int, reference: dict | None = None,
    ) -> io.NodeOutput:  # fmt: skip
        """Interrupt works between two steps of the attack."""
        blank = blank_latents(model, latent)[:1]
        config = ProbeConfig(seeds=seeds, timestep_index=timestep_index)
        probe = make_probe(denoiser_of(model), "all", config)
        cond = condition_of(model, positive, blank)
        picture = None
        if reference is not None and attack_steps:
            picture = scaled_latents(model, reference)[:1]
            picture = picture[:, :, 0] if picture.ndim == 5 else picture
        with torch.inference_mode(False), differentiable():  # nodes run in inference mode, where there are no gradients
            if picture is not None:
                allow_gradients(model)
            verdict = verify(
                probe, cond.to(model.load_device, copy=True), neurons, shape_of(blank),
                VerifyConfig(tau or None, seed, AttackConfig(steps=attack_steps)),
                reference=None if picture is None else picture.clone(),
                fingerprint=fingerprint(model), progress=progress(model),
            )  # fmt: skip
        adversarial = positive
        if verdict.embedding is not None and verdict.embedding.text is not None:
            adversarial = [[verdict.embedding.text.cpu(), positive[0][1]]]
        text = verdict.text()
        differ = verdict.untouched.memorized and not verdict.blocked.memorized
        return io.NodeOutput(text, differ, adversarial, ui=text_on(text))


NODES = [NEMOVerify]
