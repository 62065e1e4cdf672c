"""TAEF2 in a graph on ComfyUI's page: a photograph through a tap, a word map, the copy check and the LoRA report.

With ``VITRINE_WRITE_DOCS`` the graph after its run becomes docs/pictures/taef2_graph.jpg; look at it.
"""

import asyncio
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from vitrine_tests.comfy.conftest import COMFYUI, ROOT
from vitrine_tests.families.twin import network
from vitrine_tests.published.weights import WRITE, entry_of, file_of

PICTURE = ROOT / "docs" / "pictures" / "taef2_graph.jpg"
NODE = '''
import importlib.util, sys, tempfile
from pathlib import Path


class SmallKlein:
    """MODEL and CLIP of Flux.2 Klein's classes, small, with random weights: no loader knows them by a file."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CLIP"), "load", "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def load(self):
        import torch

        spec = importlib.util.spec_from_file_location("vitrine_conftest", "ROOT/tests/conftest.py")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        from vitrine_tests.comfy.tiny_checkpoints import checkpoint

        with torch.no_grad():
            return checkpoint("klein", Path(tempfile.mkdtemp()))[:2]


NODE_CLASS_MAPPINGS = {"SmallKlein": SmallKlein}
NODE_DISPLAY_NAME_MAPPINGS = {"SmallKlein": "Small Flux.2 Klein, random weights"}
'''
GRAPH = r"""(() => {
    const ordinary = 'a red bicycle\na stone bridge', prompt = 'a photograph of a cat'
    const photo = add('LoadImage', 0, 0, { image: 'chelsea.png' })
    const vae = add('VAELoader', 0, 350, { vae_name: 'taef2' })
    const small = add('SmallKlein', 0, 460)
    const text = add('CLIPTextEncode', 0, 570, { text: prompt })
    const encode = add('VAEEncode', 440, 620), decode = add('VAEDecode', 660, 620), back = add('PreviewImage', 880, 620)
    const tap = add('VitrineActivationTap', 440, 0, { selection: 'layers below', layers: 'auto', timestep: 300 })
    const word = add('VitrineWordMap', 880, 0, { word: 'cat', prompt, timestep: 300 })
    const settings = { ordinary, seeds: 2, steps: 2, cfg: 2, name: 'taef2' }
    const check = add('VitrineNEMOCopyCheck', 1320, 0, { prompts: prompt, ...settings })
    const report = add('VitrineLoRAReport', 1760, 0, {
        lora: 'small_klein.safetensors', captions: prompt, prompts: 1, ...settings })
    join(photo, 0, encode, 'pixels'); join(vae, 0, encode, 'vae')
    join(encode, 0, decode, 'samples'); join(vae, 0, decode, 'vae'); join(decode, 0, back, 'images')
    join(small, 1, text, 'clip')
    for (const node of [tap, word]) { join(photo, 0, node, 'image'); join(text, 0, node, 'positive') }
    for (const node of [tap, word, check, report]) { join(small, 0, node, 'model'); join(vae, 0, node, 'vae') }
    for (const node of [word, check, report]) join(small, 1, node, 'clip')
    for (const node of [check, report]) { join(encode, 0, node, 'latent'); join(photo, 0, node, 'pictures') }
})()"""
BOXES = "app.graph._nodes.map(n => [n.pos[0], n.pos[1], n.size[0], n.size[1]])"


@pytest.fixture
def folders(tmp_path):
    """(flags for the server, folder of its own): the published VAE, the small network's node, a LoRA and a picture."""
    data = pytest.importorskip("skimage.data")
    files = tmp_path / "files"
    for name in ("vae_approx", "loras", "nodes/small_klein", "input"):
        (files / name).mkdir(parents=True)
    for part in ("encoder", "decoder"):
        shutil.copy(file_of(entry_of(f"taef2_{part}.pth")), files / "vae_approx")
    (files / "nodes/small_klein/__init__.py").write_text(NODE.replace("ROOT", str(ROOT)))
    Image.fromarray(data.chelsea()[:, 76:376]).resize((256, 256)).save(files / "input/chelsea.png")
    width = len(network("klein").transformer_blocks[0].attn.to_out[0].weight)
    g, stem = torch.Generator().manual_seed(0), "diffusion_model.double_blocks.0.img_attn.proj"
    factors = {f"{stem}.lora_A.weight": (2, width), f"{stem}.lora_B.weight": (width, 2)}
    tensors = {key: torch.randn(shape, generator=g) for key, shape in factors.items()}
    save_file(tensors, files / "loras/small_klein.safetensors")
    lines = [f" {kind}: {kind}" for kind in ("vae_approx", "loras")] + [" custom_nodes: nodes"]
    (files / "paths.yaml").write_text("\n".join(["published:", f" base_path: {files}", *lines]) + "\n")
    flags = ("--extra-model-paths-config", str(files / "paths.yaml"), "--input-directory", str(files / "input"))
    return flags, tmp_path / "base"


async def run_and_photograph(driver, address, path):
    async with driver.page(address) as tab:
        await tab.build(GRAPH)
        entry = await tab.run(address)
        boxes = await tab.evaluate(BOXES)
        wide, tall = max(x + w for x, _, w, _ in boxes), max(y + h for _, y, _, h in boxes)
        scale = min(0.95, 1800 / wide, 950 / tall)
        await tab.evaluate(f"app.canvas.ds.scale = {scale}; app.canvas.ds.offset = [70 / {scale}, 100 / {scale}]")
        await tab.evaluate("app.canvas.setDirty(true, true)")
        await tab.settle()
        await tab.screenshot(path)
        return entry, tab.faults()


def test_the_graph_runs_on_the_page(driver, comfyui, folders, tmp_path):
    flags, base = folders
    with driver.server(COMFYUI, ROOT, base, flags) as address:
        entry, faults = asyncio.run(run_and_photograph(driver, address, tmp_path / "graph.png"))
    assert entry["status"]["completed"], entry["status"]
    assert not faults
    if WRITE:
        shot = Image.open(tmp_path / "graph.png").convert("RGB")
        small = shot.resize((1500, round(1500 * shot.height / shot.width)), Image.Resampling.LANCZOS)
        small.save(PICTURE, quality=80)
        assert PICTURE.stat().st_size < 150_000
