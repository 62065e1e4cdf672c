"""What the hard-use tests share: every long node on the portraits model, and the state a MODEL must come back to."""

import hashlib
import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from vitrine.engine.nemo import NeuronSet
from vitrine.engine.w2w import materialise, sample, write_lora
from vitrine.nodes.comfy.patches import patches_of

PROMPT = "a smiling dark face with curly blond hair on pink"
ADDRESS = "up-level1-repeat0-vit-block0-cross-q"
NEURONS = NeuronSet({"down-level1-repeat0-vit-block0-cross-v": tuple(range(40))})
CAPTIONS = "a smiling face\na pale face\na dark face on pink\nlong hair\na face on gray\nbald head"


@contextmanager
def checks(stop_at=0):
    """Count ComfyUI's looks at its interrupt flag (one an operation and one a step); raise the flag before one."""
    import comfy.model_management as management

    real, seen = management.throw_exception_if_processing_interrupted, SimpleNamespace(count=0)

    def look():
        seen.count += 1
        if seen.count == stop_at:
            management.interrupt_current_processing(True)
        return real()

    management.throw_exception_if_processing_interrupted = look
    try:
        yield seen
    finally:
        management.throw_exception_if_processing_interrupted = real
        management.interrupt_current_processing(False)


def weights_of(model):
    """Hash of every tensor of a MODEL, with its own patches and no clone's in place."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    found = hashlib.sha256()
    for name, value in sorted(model.model.state_dict().items()):
        found.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def marks_on(model):
    """Hooks and replaced methods on the network, gradients switched on, and what stands on the MODEL."""
    modules = list(model.model.modules())
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "hooks": sum(len(getattr(m, t)) for m in modules for t in tables),
        "methods": sum(
            callable(v) and not isinstance(v, torch.nn.Module)
            for m in modules
            for v in vars(m).values()
            if getattr(v, "__name__", "") == "forward"
        ),
        "gradients": sum(p.grad is not None for p in model.model.parameters()),
        "standing": [str(p) for p in patches_of(model)],
        "attachments": len(model.attachments),
    }


class Scene:
    """The portraits model, clones of it with one thing each, and every long node as a function of nothing."""

    def __init__(self, comfy, folder):
        self.comfy, self.folder, self.numbers = comfy, folder, itertools.count()
        self.model, self.clip, self.vae = comfy.call("VitrineLoadPortraits")
        self.positive, self.negative = (self.encode(t) for t in (PROMPT, ""))
        self.latent = {"samples": torch.zeros(1, 4, 16, 16)}
        self.space = comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]
        self.person, self.other = (self.somebody(seed) for seed in (17, 4))
        self.blocked = self.block(self.model)
        self.late = self.edit_late(self.model)
        self.tapped = self.tap(self.model)[0]
        other, self.other_clip, _ = comfy.call("VitrineLoadPortraitsTransformer", weight="power-cosine")
        self.told = comfy.call("VitrineLoadControl", model=other, file="portraits power-cosine")[0]
        self.models = (self.model, self.told)
        self.pictures = comfy.call("VitrineRenderPortrait", seed=300_000, count=4, size=64, part="shirt")

    def encode(self, text):
        with torch.inference_mode():
            return self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text))

    def somebody(self, seed):
        told = {"spread": 1.0, "components": 0, "truncation": 0.0, "wanted": ""}
        return self.comfy.call("VitrineW2WSample", space=self.space, seed=seed, **told)[0]

    def block(self, model):
        told = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0}
        return self.comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=NEURONS, **told)[0]

    def edit_late(self, model, start=700.0):
        told = {"space": self.space, "w2w_model": self.person, "late_model": self.other, "strength": 1.0}
        return self.comfy.call("VitrineApplyW2WModel", model=model, start_timestep=start, **told)[0]

    def tap(self, model):
        return self.comfy.call("VitrineTapDuringSampling", model=model, layers=ADDRESS, record_steps="all")

    def ksampler(self, model, steps=3, cfg=3.0, seed=5):
        """Latents of core KSampler."""
        node = self.comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]()
        with torch.inference_mode():
            told = (seed, steps, cfg, "euler", "ddim_uniform", self.positive, self.negative, self.latent, 1.0)
            return node.sample(model, *told)[0]["samples"].clone()

    def runs(self):
        """Name -> function that runs a long node at small settings and returns its tensors."""
        probe = {"seeds": 3, "timestep_index": 4, "latent": self.latent}
        captions = {"model": self.model, "clip": self.clip, "prompts": CAPTIONS}
        picture = {"model": self.model, "vae": self.vae, "positive": self.positive}
        own = {"selection": "layers below", "layers": ADDRESS, "timestep": 50.0, "seed": 0, "ensemble": 2}
        images, _, masks = self.pictures
        calibration = self.comfy.call("VitrineNEMOCalibrate", **captions, **probe)[0]
        both = self.tap(self.block(self.edit_late(self.model)))[0]
        reference = {"samples": torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(2))}
        student = {"student": "(the model is the student)", "preset": "manual", "timestep": 999.0, "noise": "unit"}
        call = self.comfy.call
        return {
            "KSampler": lambda: [self.ksampler(self.model)],
            "KSampler, neurons blocked": lambda: [self.ksampler(self.blocked)],
            "KSampler, late W2W model": lambda: [self.ksampler(self.late)],
            "KSampler, taps": lambda: [self.ksampler(self.tapped)],
            "KSampler, all three": lambda: [self.ksampler(both)],
            "Look Inside (Activation Tap)": lambda: tensors(
                call("VitrineActivationTap", image=images, dtype="float32", **picture, **own)[0]),
            "Find Same Points": lambda: [
                call("VitrineFindCorrespondence", source=images[:1], target=images[1:], points="0.4 0.4",
                     softness=0.02, **picture, **own)[1]],
            "Segment Like This": lambda: [
                call("VitrineSegmentLikeThis", examples=images, masks=masks, images=images, hidden=0, **picture,
                     **own)[1]],
            "Rank Layers": lambda: [
                call("VitrineRankActivations", images=images, masks=masks, layers="mid-*-q, up-level0-repeat0-*-q",
                     timestep=50.0, noise=0.0, granularity=0.0, budget=0, most=2, **picture)[3]],
            "Word Map": lambda: list(
                call("VitrineWordMap", clip=self.clip, image=images, word="hair", seed=0, timestep=300.0, prompt=PROMPT,
                     **picture)),
            "Calibrate Copy Detection (NEMO)": lambda: list(
                call("VitrineNEMOCalibrate", measure="statistics", **captions, **probe)[0].statistics.means.values()),
            "Calibrate Copy Detection (NEMO), score": lambda: [
                torch.tensor(call("VitrineNEMOCalibrate", measure="score", **captions, **probe)[1])],
            "Detect a Copied Prompt (NEMO)": lambda: [
                call("VitrineNEMODetect", model=self.model, positive=self.positive, negative=self.negative,
                     method="one step", vae=self.vae, **probe)[3]],
            "Find Copying Neurons (NEMO)": lambda: [
                call("VitrineNEMOFindNeurons", model=self.model, positive=self.positive, calibration=calibration,
                     effect_fraction=0.9, mode="chain", scope="down+mid", **probe)[2]],
            "Verify Blocking (NEMO)": lambda: [
                call("VitrineNEMOVerify", model=self.model, positive=self.positive, neurons=NEURONS, tau=0.3, seed=101,
                     attack_steps=3, reference=reference, **probe)[2][0][0]],
            "One-Step Sampler (EMD)": lambda: [
                call("VitrineEMDOneStepGenerator", model=self.late, positive=self.positive, latent=self.latent, seed=1,
                     **student)[0]["samples"]],
            "Size-Conditioned Sampler (Control)": lambda: [self.controlled()],
            "Train One-Step Student (EMD)": self.distilled,
            "Person from Picture (W2W)": lambda: [
                call("VitrineW2WInvert", space=self.space, image=images[:1], mask=masks[:1], preset="custom", steps=3,
                     lr=0.6, batch=2, components=0, prior=0.0, seed=0, **picture)[0].coefficients],
            "Slider from Pictures (W2W)": lambda: [
                call("VitrineTrainW2WSlider", space=self.space, before=images[:2], after=images[2:], label="own",
                     steps=2, seed=0, start_timestep=900.0, save_as="", lr=0.3, **picture)[0].directions["own"]],
            "Build LoRA Space (W2W)": self.built,
        }  # fmt: skip

    def controlled(self):
        """Latents of a sampler that guides by the size as well."""
        with torch.inference_mode():
            texts = [self.other_clip.encode_from_tokens_scheduled(self.other_clip.tokenize(t)) for t in (PROMPT, "")]
        told = {
            "seed": 3, "steps": 3, "sampler_name": "euler", "scheduler": "ddim_uniform", "denoise": 1.0, "flip": True,
            "nesting": "control_inner", "width": 24, "height": 32, "crop_left": 3, "crop_top": 6, "cfg": 2.0,
            "size_guidance": 1.4, "form": "power_cos", "alpha": 2.0, "clock": "native", "reference": "target",
            "reference_width": 48, "reference_height": 40,
        }  # fmt: skip
        return self.comfy.call(
            "VitrineControlConditionedSampler",
            model=self.told,
            positive=texts[0],
            negative=texts[1],
            latent_image=self.latent,
            **told,
        )[0]["samples"]

    def distilled(self):
        """A stopped run goes on under its name, so the run after an interruption has the same one."""
        told = {"base": "portraits", "prompts": "a smiling face\na pale face", "steps": 3, "batch": 2, "rank": 2}
        told |= {"K": 2, "guidance": 2.0, "timestep": 625.0, "diff_instruct": False, "seed": 0}
        return [
            self.again(
                "Train One-Step Student (EMD)", lambda name: self.comfy.call("VitrineEMDDistill", name=name, **told)[0]
            )
        ]

    def built(self):
        """The same of a folder of LoRAs."""
        if not (self.folder / "hard").is_dir():
            for i, row in enumerate(sample(self.space, range(6))):
                write_lora(self.folder / "hard" / f"p{i}.safetensors", materialise(self.space, row), "kohya")
        told = {"folder": "hard", "mode": "factors", "components": 0, "base": ""}
        make = lambda name: self.comfy.call("VitrineBuildW2WSpace", name=name, **told)[0]  # noqa: E731
        made = self.again("Build LoRA Space (W2W)", make)
        return [made.coefficients, made.components]

    def again(self, kind, make):
        """Run under a new name, which no other scene of the session has, or under the one whose run was stopped."""
        pending = self.__dict__.setdefault("pending", {})
        name = pending.setdefault(kind, f"{self.folder.name}-{next(self.numbers)}")
        made = make(name)
        del pending[kind]
        return made


def tensors(activations):
    return [activations[a].tensor for a in activations]
