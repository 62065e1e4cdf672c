"""Hard use: stopped anywhere, queued twice, queued again and again, little memory, any order of patches."""

import asyncio
import gc
import itertools
import logging
import os
import random
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
LONG = (
    "KSampler", "KSampler, neurons blocked", "KSampler, late W2W model", "KSampler, taps", "KSampler, all three",
    "Look Inside (Activation Tap)", "Find Same Points", "Segment Like This", "Rank Layers", "Word Map",
    "Calibrate Copy Detection (NEMO)", "Calibrate Copy Detection (NEMO), score", "Detect a Copied Prompt (NEMO)",
    "Find Copying Neurons (NEMO)", "Verify Blocking (NEMO)", "One-Step Sampler (EMD)",
    "Size-Conditioned Sampler (Control)", "Train One-Step Student (EMD)", "Person from Picture (W2W)",
    "Slider from Pictures (W2W)", "Build LoRA Space (W2W)",
)  # fmt: skip


hard = None


@pytest.fixture(scope="module")
def scene(comfy, beside, tmp_path_factory):
    import folder_paths

    global hard
    hard = beside("hard")
    from vitrine.engine.portraits.shipped import STUDENT_FOLDER

    folder = tmp_path_factory.mktemp("loras")
    for path in (folder, STUDENT_FOLDER):
        folder_paths.add_model_folder_path("loras", str(path))
    made = hard.Scene(comfy, folder)
    made.table = made.runs()
    assert set(made.table) == set(LONG)
    return made


def same(found, wanted):
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# --- interruption ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LONG)
def test_stopped_anywhere_leaves_nothing_behind(scene, name):
    """The model is the same bit for bit, nothing is left on it, and the next run is an uninterrupted one."""
    from comfy.model_management import InterruptProcessingException

    run, rng = scene.table[name], random.Random(name)
    before = [(hard.weights_of(m), hard.marks_on(m)) for m in scene.models]
    with hard.checks() as seen:
        wanted = run()
    assert seen.count >= 1, "the node looks at the interrupt flag"
    stopped = 0
    for _ in range(3):
        with hard.checks(rng.randint(1, seen.count)):
            try:
                run()
            except InterruptProcessingException:
                stopped += 1
        assert [(hard.weights_of(m), hard.marks_on(m)) for m in scene.models] == before
        assert same(run(), wanted)
    assert stopped


# --- one queue ------------------------------------------------------------------------------------------------------
def small(seed, kind, size=64):
    """A graph of a few nodes: sampling with a late person and taps, or with a one-step student."""
    person = {"space": ["5", 0], "spread": 1.0, "components": 0, "truncation": 0.0, "wanted": "", "attributes": "auto"}
    graph = {
        "1": ("VitrineLoadPortraits", {}),
        "2": ("CLIPTextEncode", {"clip": ["1", 1], "text": "a smiling face on blue"}),
        "3": ("CLIPTextEncode", {"clip": ["1", 1], "text": ""}),
        "4": ("EmptyLatentImage", {"width": size, "height": size, "batch_size": 1}),
        "5": ("VitrineLoadW2WSpace", {"space_file": "portraits people (shipped)", "components": 0}),
        "6": ("VitrineW2WSample", {"seed": 17, **person}),
        "7": ("VitrineW2WSample", {"seed": 4, **person}),
        "8": (
            "VitrineApplyW2WModel",
            {
                "model": ["1", 0],
                "space": ["5", 0],
                "w2w_model": ["6", 0],
                "strength": 1.0,
                "start_timestep": 700.0,
                "late_model": ["7", 0],
            },
        ),
        "20": ("VAEDecode", {"samples": ["12", 0], "vae": ["1", 2]}),
        "21": ("PreviewImage", {"images": ["20", 0]}),
    }
    if kind == "student":
        graph["12"] = (
            "VitrineEMDOneStepGenerator",
            {
                "model": ["8", 0],
                "positive": ["2", 0],
                "latent": ["4", 0],
                "seed": seed,
                "preset": "auto",
                "student": "vitrine/vitrine-portraits-emd-student.safetensors",
            },
        )
    else:
        graph["9"] = ("VitrineTapDuringSampling", {"model": ["8", 0], "layers": "mid-vit-out", "record_steps": "0 2"})
        graph["11"] = ("KSampler", {
            "model": ["9", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0], "seed": seed,
            "steps": 4, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0})  # fmt: skip
        graph["12"] = ("VitrineCollectTaps", {"recorder": ["9", 1], "latent": ["11", 0], "step": 2, "half": "cond"})
        graph["20"][1]["samples"] = ["12", 2]
    return {k: {"class_type": kind, "inputs": inputs} for k, (kind, inputs) in graph.items()}


async def _queued(session, address, graphs, polls):
    """Queue graphs at once; the PNG bytes each one shows, in their order."""
    numbers = []
    for graph in graphs:
        async with session.post(f"{address}/prompt", json={"prompt": graph}) as answer:
            told = await answer.json()
            assert answer.status == 200, told
            numbers.append(told["prompt_id"])
    done = {}
    async for _ in polls("the end of all runs"):
        async with session.get(f"{address}/history") as answer:
            done = await answer.json()
        if all(n in done for n in numbers):
            break
    shown = []
    for n in numbers:
        assert done[n]["status"]["status_str"] == "success", done[n]["status"]
        (image,) = done[n]["outputs"]["21"]["images"]
        async with session.get(f"{address}/view", params=image) as answer:
            shown.append(_pixels(await answer.read()))
    return shown


def _pixels(png):
    import io

    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB").tobytes()


BLANK = {
    "20": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
    "21": {"class_type": "PreviewImage", "inputs": {"images": ["20", 0]}},
}
"""ComfyUI frees memory between two runs: after this one, what ``/free`` asked for before it has been done."""


async def _alone_and_together(address, polls):
    import aiohttp

    graphs = [small(1, "taps"), small(2, "student")]
    async with aiohttp.ClientSession() as session:
        alone = []
        for graph in graphs:
            alone += await _queued(session, address, [graph], polls)
            await session.post(f"{address}/free", json={"unload_models": True, "free_memory": True})
            await _queued(session, address, [BLANK], polls)
        return alone, await _queued(session, address, graphs, polls)


@pytest.fixture(scope="module")
def servers(comfyui, beside, tmp_path_factory):
    """(pictures alone, pictures queued together) of a server started with flags; each server runs once."""
    page, made = beside("page"), {}

    def start(*flags):
        if flags not in made:
            base = tmp_path_factory.mktemp("server") / "base"
            with page.server(comfyui, ROOT, base, flags) as address:
                made[flags] = asyncio.run(_alone_and_together(address, page.polls))
        return made[flags]

    return start


def test_two_workflows_queued_at_once(servers):
    alone, together = servers()
    assert together == alone and alone[0] != alone[1]


def test_started_without_a_cache(servers):
    alone, together = servers("--cache-none")
    assert together == alone == servers()[0]


# --- again and again ------------------------------------------------------------------------------------------------
@pytest.fixture
def queued(comfy):
    """Queues a graph again and again on one executor, as a server has; (loaded models, their hooks) after each run."""
    from comfy import model_management

    executor = comfy.executor()

    def run(seeds):
        seen = []
        for seed in seeds:
            result, error = comfy.run(small(seed, "taps"), executor)
            assert error is None and result["outputs"]["21"]["images"]
            loaded = [m.model for m in model_management.current_loaded_models if m.model is not None]
            backbones = {id(m.model): m.model for m in loaded if hasattr(m.model, "diffusion_model")}
            modules = [module for network in backbones.values() for module in network.modules()]
            seen.append((len(loaded), sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)))
        return seen

    return run


def test_queued_again_and_again(queued):
    """Hooks and loaded models stay what they were."""
    seen = queued(range(6))
    assert all(hooks == 0 for _, hooks in seen)
    assert len({count for count, _ in seen[2:]}) == 1, "no loaded model is left over"


def resident():
    """MB of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads Linux's figures")
def test_queued_again_and_again_takes_no_more_memory(queued, record_property):
    queued(range(8))
    start, count = resident(), 20
    seen = queued(range(100, 100 + count))
    grown = resident() - start
    record_property("grown_mb", grown)
    logging.getLogger(__name__).info("%d runs: %.1f MB more", count, grown)
    assert grown < 20 and len(set(seen)) == 1, "no loaded model is left over"


# --- little memory --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("room", [0.1, 300_000], ids=["novram", "lowvram"])
def test_weights_that_stay_outside(scene, monkeypatch, room):
    """What --novram and --lowvram do to a model, on the CPU: weights are cast and patched layer by layer."""
    from comfy import model_management

    names = (
        "KSampler, all three",
        "Find Copying Neurons (NEMO)",
        "Look Inside (Activation Tap)",
        "Word Map",
        "Verify Blocking (NEMO)",
        "Person from Picture (W2W)",
        "Slider from Pictures (W2W)",
    )
    usual = {name: scene.table[name]() for name in names}
    before = hard.weights_of(scene.model), hard.marks_on(scene.model)
    real = model_management.LoadedModel.model_load
    monkeypatch.setattr(model_management.LoadedModel, "model_load", lambda self, *a, **k: real(self, room))
    model_management.unload_all_models()
    try:
        for name in names:
            found = scene.table[name]()
            assert scene.model.model.model_lowvram, "the weights are outside"
            for a, b in zip(found, usual[name], strict=True):
                assert a.shape == b.shape and float((a - b).abs().max()) <= 1e-4 * float(b.abs().max()), name
    finally:
        monkeypatch.undo()
        model_management.unload_all_models()
    assert (hard.weights_of(scene.model), hard.marks_on(scene.model)) == before


# --- every order ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def patchers(comfy, scene):
    """Name -> function from MODEL to a patched clone: three of core's, four of ours."""
    for extra in ("nodes_freelunch", "nodes_pag"):
        path = str(COMFYUI / "comfy_extras" / f"{extra}.py")
        assert comfy.loop.run_until_complete(comfy.nodes.load_custom_node(path, module_parent="comfy_extras"))
    core = comfy.nodes.NODE_CLASS_MAPPINGS
    student = "vitrine/vitrine-portraits-emd-diff-instruct.safetensors"
    scene.recorders = []

    def tap(model):
        clone, recorder = scene.tap(model)
        scene.recorders.append(recorder)
        return clone

    def free(model):
        return core["FreeU_V2"].execute(model, 1.3, 1.4, 0.9, 0.2).result[0]

    def perturbed(model):
        return core["PerturbedAttentionGuidance"].execute(model, 2.0).result[0]

    return {
        "LoRA": lambda m: core["LoraLoaderModelOnly"]().load_lora_model_only(m, student, 0.5)[0],
        "FreeU": free,
        "PAG": perturbed,
        "NEMO": scene.block,
        "W2W": scene.edit_late,
        "Tap": tap,
    }


def test_any_order_of_patches(scene, patchers):
    """They give one picture; only the order of two weight patches shows, in the last bits."""
    orders = list(itertools.permutations(patchers))
    chosen = [orders[0], *random.Random(0).sample(orders, 11)]
    before = hard.weights_of(scene.model), hard.marks_on(scene.model)
    plain = scene.ksampler(scene.model, 2)
    found, taps = {}, {}
    for order in chosen:
        model = scene.model
        for name in order:
            model = patchers[name](model)
        made = scene.ksampler(model, 2)
        rank = order.index("LoRA") < order.index("W2W")
        recorded = scene.recorders[-1].activations(1, "cond")[hard.ADDRESS].tensor
        assert torch.equal(made, found.setdefault(rank, made)), order
        assert torch.equal(recorded, taps.setdefault(rank, recorded)), order
    first = next(iter(found.values()))
    assert all(float((f - first).abs().max()) < 1e-4 for f in found.values())
    assert float((first - plain).abs().max()) > 0.1
    assert torch.equal(scene.ksampler(scene.model, 2), plain)
    assert (hard.weights_of(scene.model), hard.marks_on(scene.model)) == before


def test_taps_beside_perturbed_attention_are_the_prompts(scene, patchers):
    """PAG calls the network once more a step, with its attention spoilt: that pass is not what is recorded."""
    recorded = []
    for make in (lambda m: m, patchers["PAG"]):
        clone, recorder = scene.tap(make(scene.model))
        scene.ksampler(clone, 1)
        recorded.append(recorder.activations(0, "cond")[hard.ADDRESS].tensor)
    spoilt = scene.ksampler(patchers["PAG"](scene.model), 2)
    assert not torch.equal(spoilt, scene.ksampler(scene.model, 2)), "the patch has an effect"
    assert torch.equal(*recorded)
