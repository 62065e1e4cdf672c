"""Every job of the engine that resumes, at tiny size: what it is given, one other value of each, and how it runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from diffusers import DDIMScheduler
from vitrine.engine.activations import TapConfig
from vitrine.engine.activations.qualitative_filter import measure_properties
from vitrine.engine.activations.ranked_pictures import Pictures
from vitrine.engine.activations.ranking import RankingConfig, rank_sites
from vitrine.engine.activations.site_search import greedy_search
from vitrine.engine.activations.streaming import stream_taps
from vitrine.engine.control import (
    AugmentConfig,
    ControlEmbedder,
    ControlRecord,
    ControlSpec,
    ControlTrainConfig,
    ControlTrainer,
    TrainSetup,
    control_width,
    injected,
)
from vitrine.engine.copies import CheckConfig, Instruments, check_copies
from vitrine.engine.copies import Pictures as TrainingPictures
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.emd import EStepConfig
from vitrine.engine.emd.emd_trainer import Trainer
from vitrine.engine.emd.train_config import EMDTrainConfig
from vitrine.engine.io.lora_writing import write_lora
from vitrine.engine.jobs.run import Run
from vitrine.engine.jobs.stored_text import StoredText
from vitrine.engine.network.condition import Condition
from vitrine.engine.settings.ranking_options import FilterRule
from vitrine.engine.w2w import (
    BuildConfig,
    InvertConfig,
    LoraTrainConfig,
    Manifest,
    PairConfig,
    Pairs,
    Subject,
    build_space,
    initial_lora,
    invert_in,
    train_loras,
    train_pair_slider,
)
from vitrine.engine.w2w.space.principal_components import Matrix, PCAConfig, principal_components
from vitrine_tests import models
from vitrine_tests.engine.small_loras import lora

SIZE = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
}


class Job(NamedTuple):
    """One job.

    Attributes:
        inputs: name -> value, or a function that makes it (networks anew each time, as another process would).
        others: name -> another value of it.
        run: (folder, inputs, progress) -> name -> tensor, what the job is for.
        kill: (step, total) -> whether the process dies here; something has been saved by then.
    """

    inputs: dict[str, Any]
    others: dict[str, Any]
    run: Callable[..., dict[str, torch.Tensor]]
    kill: Callable[[int, int], bool] = lambda step, total: step >= 2

    def call(self, folder, progress=lambda *_: None, **changed):
        made = {name: value() if callable(value) else value for name, value in (self.inputs | changed).items()}
        return self.run(folder, progress=progress, **made)


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unet():
    return models.unet(**SIZE)


def other_unet():
    """One weight of another size: what sampled weights overlook."""
    net = models.unet(**SIZE)
    with torch.no_grad():
        net.conv_out.bias[0] += 1e-3
    return net


def with_lora(scale=1.0):
    from peft import LoraConfig, inject_adapter_in_model

    net = models.unet(**SIZE)
    torch.manual_seed(3)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False), net)
    for module in net.modules():
        if hasattr(module, "base_layer"):
            module.set_scale("default", scale)
    return net


def scheduler(**changes):
    return DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", **changes)


NETWORKS = {"network": unet, "scheduler": scheduler}
OTHER_NETWORKS = {"network": other_unet, "scheduler": lambda: scheduler(prediction_type="v_prediction")}


def text(seed, count=1):
    return Condition(noise(seed, count, 5, 12))


# --- taps ---------------------------------------------------------------------------------------------------------
def taps(folder, network, scheduler, latents, prompts, config, progress):
    source = lambda numbers: (latents[numbers], prompts.take(torch.tensor(numbers)))  # noqa: E731
    denoiser, names = Denoiser.from_diffusers(network, scheduler), [f"p{n}" for n in range(len(latents))]
    found = stream_taps(denoiser, source, names, config, folder, "1MiB", progress)
    read = found.read(names, [a for part in found.parts for a in part])
    return {a: v.tensor for a, v in read.items()}


def ranking(folder, network, scheduler, latents, prompts, masks, timestep, progress):
    config = RankingConfig("up-*-cross-q", timestep, FilterRule(None, None, (None, None)), most=1)
    denoiser, pictures = Denoiser.from_diffusers(network, scheduler), Pictures.of(latents, prompts, masks)
    found = rank_sites(denoiser, pictures, config, state=folder, memory="16MiB", progress=progress)
    return {a: torch.tensor([found.search.singles[a], p.noise]) for a, p in found.properties.items()}


def properties(folder, network, scheduler, latents, prompts, timestep, progress):
    denoiser, places = Denoiser.from_diffusers(network, scheduler), [f"up-level{n}-repeat0-res-out" for n in (0, 1)]
    told = {"state": folder / "filter.safetensors", "progress": progress}
    found = measure_properties(denoiser, latents, prompts, places, timestep, **told)
    return {a: torch.tensor([p.noise, p.locality]) for a, p in found.items()}


def comparison(folder, worth, progress):
    found = greedy_search(
        sorted(worth),
        lambda places: sum(worth[p] for p in places),
        progress=progress,
        state=Run(folder / "scores.safetensors", "comparison", {"worth": worth}),
    )
    return {a: torch.tensor(v) for a, v in found.singles.items()}


# --- NeMo ---------------------------------------------------------------------------------------------------------
def copies(folder, network, prompts, pictures, captions, config, progress):
    def sample(prompt, seeds, bare, after):
        after(1)
        return torch.stack([noise(len(prompt) + seed, 3, 64, 64).sigmoid() for seed in seeds])

    told = Instruments(sample, 1, identity={"network": network})
    known = TrainingPictures([f"{i}.png" for i in range(len(pictures))], lambda i: pictures[i])
    settings = replace(config, ordinary=captions)
    check = check_copies(list(prompts), folder, told, known, settings, progress=progress)
    return {p.prompt: torch.stack([p.ratios, p.areas]) for p in check.prompts}


# --- W2W ----------------------------------------------------------------------------------------------------------
def lora_folder(folder, seeds, strength=0.05, names="abcdef"):
    for name, seed in zip(names, seeds, strict=False):
        write_lora(folder / f"{name}.safetensors", lora(seed, start=7, strength=strength))
    return folder


def build(folder, loras, config, progress):
    files = lora_folder(folder.with_name(f"{folder.name}-loras"), **loras)
    return {"components": build_space(files, config, progress, folder).space.coefficients}


def small_space(seed=0):
    net, rows = unet(), []
    for i in range(6):
        layers = initial_lora(net, ("attn2.to_q", "attn2.to_v"), 1, 1.0, seed)
        manifest = Manifest.of(layers)
        rows.append(manifest.flatten(layers) + 0.1 * noise(10 * seed + i, manifest.size))
    return principal_components(Matrix(torch.stack(rows)), PCAConfig()).space(manifest)


def sums(folder, rows, config, progress):
    found = principal_components(Matrix(rows), config, progress, resume=folder / "sums.safetensors")
    return {"basis": found.basis}


def inversion(folder, network, scheduler, space, latents, prompt, mask, config, progress):
    denoiser = Denoiser.from_diffusers(network.requires_grad_(False), scheduler)
    return {"beta": invert_in(folder, denoiser, space, latents, prompt, config, mask, progress).coefficients}


def pair_slider(folder, network, scheduler, space, targets, prompt, people, start, config, progress):
    denoiser, pairs = Denoiser.from_diffusers(network.requires_grad_(False), scheduler), Pairs(targets, prompt, people)
    return {"change": train_pair_slider(denoiser, space, pairs, config, start, folder, progress)}


def loras(folder, network, scheduler, latents, prompt, config, progress):
    from vitrine.engine.w2w import read_header, read_lora

    denoiser = Denoiser.from_diffusers(network.requires_grad_(False), scheduler)
    makers = [lambda i=i: Subject(f"s{i}", latents[i : i + 1], prompt, i) for i in range(len(latents))]
    names = [f"s{i}" for i in range(len(latents))]
    files = train_loras(denoiser, makers, names, folder, config, together=1, progress=progress)
    return {f.stem + path: layer.up for f in files for path, layer in read_lora(read_header(f)).items()}


# --- trainers -----------------------------------------------------------------------------------------------------
def emd_trainer(folder, network, scheduler, prompts, empty, config):
    teacher = Denoiser.from_diffusers(network, scheduler)
    return Trainer(teacher, prompts, (4, 8, 8), config, folder, empty)


def emd(folder, progress, until=None, **inputs):
    trainer = emd_trainer(folder, **inputs)
    trainer.run(progress, until)
    return dict(trainer.average.values)


def control_trainer(folder, network, embedder, schedule, empty, records, config):
    states = noise(2, 5, 5, models.TEXT)  # of five prompts; the last is the empty one
    call = injected(network, lambda x, t, s: network(x, encoder_hidden_states=states[s], timestep=t).sample)
    trainee = TrainSetup(call, embedder, schedule, empty, dict(network.named_parameters()))
    return ControlTrainer(trainee, records, config, folder)


def control(folder, progress, until=None, **inputs):
    trainer = control_trainer(folder, **inputs)
    trainer.run(progress, until)
    return dict(trainer.average.values)


def tiny_pixart(seed=0):
    return models.pixart(seed, in_channels=3, out_channels=3, sample_size=8)


def embedder(scale=0.02):
    torch.manual_seed(1)
    net = ControlEmbedder(ControlSpec(), control_width(tiny_pixart()))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(scale * noise(4, *p.shape))
    return net


def records(shade=0.5, size=96, kind=1):
    return [ControlRecord(shade * noise(i, 3, 12, 12), torch.tensor(kind * i), 64, size) for i in range(2)]


def texts(folder, prompts, encoder, progress):
    encode = lambda part: Condition(torch.stack([encoder * len(t) for t in part]))  # noqa: E731
    stored = StoredText.encoded(prompts, encode, folder, {"encoder": encoder}, progress)
    return {"text": stored.take(torch.arange(len(prompts))).text}


def masks(seed):
    return (noise(seed, 8, 32, 32) > 0).long()


EMD_SETTINGS = EMDTrainConfig.from_dict(
    {"steps": 3, "batch": 2, "rank": 2, "save_every": 1, "guidance": 2.0, "auto_gz": False, "chain": EStepConfig(2)}
)
CONTROL_SETTINGS = ControlTrainConfig.from_dict(
    {"steps": 3, "batch": 4, "lr": 3e-3, "augment": AugmentConfig(8), "save_every": 1}
)
INVERT_SETTINGS = InvertConfig(components=4, steps=4, check_every=1)
LORA_SETTINGS = LoraTrainConfig(rank=1, alpha=1.0, targets=("attn2.to_v",), steps=2)
PICTURES = {"latents": noise(1, 8, 4, 16, 16), "prompts": text(2)}
OTHER_PICTURES = {"latents": noise(3, 8, 4, 16, 16), "prompts": text(4)}
TIMES, OTHER_TIMES = {"timestep": 50.0}, {"timestep": 900.0}

JOBS = {
    "taps": Job(
        NETWORKS | {"latents": noise(0, 3, 4, 8, 8), "prompts": text(1, 3),
                    "config": TapConfig("up-level0-*-out", batch=1)},
        OTHER_NETWORKS | {"network": with_lora, "latents": noise(9, 3, 4, 8, 8), "prompts": text(8, 3),
                          "config": TapConfig("up-level0-*-out", 51.0, batch=1)}, taps),
    "ranking": Job(NETWORKS | PICTURES | TIMES | {"masks": masks(5)},
                   OTHER_NETWORKS | OTHER_PICTURES | OTHER_TIMES | {"masks": masks(6)}, ranking,
                   lambda step, total: step == total),
    "properties": Job(NETWORKS | PICTURES | TIMES, OTHER_NETWORKS | OTHER_PICTURES | OTHER_TIMES, properties),
    "comparison": Job({"worth": {"a": 1.0, "b": 2.0, "c": 0.5}}, {"worth": {"a": 1.0, "b": 2.5, "c": 0.5}}, comparison),
    "copy check": Job(
        {"network": unet, "prompts": ("a cat", "a house"), "pictures": [noise(5, 3, 64, 64).sigmoid()],
         "captions": ("x", "yy"), "config": CheckConfig(2, usual=2)},
        {"network": other_unet, "prompts": ("a cat", "a mouse"), "pictures": [noise(6, 3, 64, 64).sigmoid()],
         "captions": ("x", "yyy"), "config": CheckConfig(2, 2001, usual=2)}, copies, lambda step, total: step == 4),
    "build, factors": Job(
        {"loras": {"seeds": (1, 2, 3, 4)}, "config": BuildConfig("factors")},
        {"loras": {"seeds": (1, 2, 3, 5)}, "config": BuildConfig("factors", 2)}, build, lambda s, n: n == 1),
    "build, delta": Job(
        {"loras": {"seeds": (1, 2, 3, 4)}, "config": BuildConfig("delta")},
        {"loras": {"seeds": (1, 2, 3, 4), "strength": 0.06}, "config": BuildConfig("delta", 2)}, build),
    "principal components": Job({"rows": noise(0, 6, 50), "config": PCAConfig(3)},
                                {"rows": noise(1, 6, 50), "config": PCAConfig(2)}, sums, lambda s, n: s == n),
    "inversion": Job(
        NETWORKS | {"space": small_space, "latents": noise(1, 1, 4, 8, 8), "prompt": text(2),
                    "mask": torch.ones(1, 1, 8, 8), "config": INVERT_SETTINGS},
        OTHER_NETWORKS | {"space": lambda: small_space(1), "latents": noise(3, 1, 4, 8, 8), "prompt": text(4),
                          "mask": torch.eye(8)[None, None], "config": replace(INVERT_SETTINGS, lr=0.2)}, inversion),
    "pair slider": Job(
        NETWORKS | {"space": small_space, "targets": noise(1, 2, 2, 4, 8, 8), "prompt": text(2),
                    "people": noise(5, 2, 5), "start": noise(6, 5), "config": PairConfig(4, 2, save_every=1)},
        OTHER_NETWORKS | {"space": lambda: small_space(1), "targets": noise(3, 2, 2, 4, 8, 8), "prompt": text(4),
                          "people": noise(7, 2, 5), "start": noise(8, 5), "config": PairConfig(4, 3)}, pair_slider),
    "LoRA training": Job(
        NETWORKS | {"latents": noise(1, 3, 4, 8, 8), "prompt": text(2), "config": LORA_SETTINGS},
        OTHER_NETWORKS | {"latents": noise(3, 3, 4, 8, 8), "prompt": text(4),
                          "config": replace(LORA_SETTINGS, lr=1e-3)}, loras, lambda step, total: step == 3),
    "EMD": Job(
        NETWORKS | {"prompts": text(1, 4), "empty": text(2), "config": EMD_SETTINGS},
        {"network": other_unet, "scheduler": lambda: scheduler(num_train_timesteps=500), "prompts": text(3, 4),
         "empty": text(4), "config": replace(EMD_SETTINGS, lr_score=1e-3)}, emd),
    "control": Job(
        {"network": tiny_pixart, "embedder": embedder, "schedule": NoiseSchedule.scaled_linear,
         "empty": torch.tensor(4), "records": records, "config": CONTROL_SETTINGS},
        {"network": lambda: tiny_pixart(1), "embedder": lambda: embedder(0.03), "empty": torch.tensor(3),
         "schedule": lambda: NoiseSchedule.scaled_linear(500), "records": lambda: records(0.6),
         "config": replace(CONTROL_SETTINGS, lr=1e-3)}, control),
    "text states": Job({"prompts": ["a", "bb"] * 70, "encoder": noise(0, 5, 12)},
                       {"prompts": ["a", "cc"] * 70, "encoder": noise(1, 5, 12)}, texts),
}  # fmt: skip
