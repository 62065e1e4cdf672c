"""The shipped LoRAs stand in a folder of the list; graphs that name them as they once stood still open and run."""

import asyncio
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = "vitrine-portraits-emd-student.safetensors"


def graph(name):
    nodes = {
        "1": ("VitrineLoadPortraits", {"model": "portraits, 64 px"}),
        "2": ("LoraLoaderModelOnly", {"model": ["1", 0], "lora_name": name, "strength_model": 1.0}),
        "3": ("VitrineActivePatches", {"model": ["2", 0]}),
    }
    return {k: {"class_type": kind, "inputs": inputs} for k, (kind, inputs) in nodes.items()}


def test_the_root_of_the_list_is_the_users_own(comfy):
    import folder_paths
    from vitrine.nodes.comfy.w2w import lora_folders

    folder_paths.filename_list_cache.clear()
    shipped = [n for n in folder_paths.get_filename_list("loras") if "portraits-emd" in n]
    assert len(shipped) == 2 and all(Path(n).parent == Path("vitrine") for n in shipped)
    assert len(list(lora_folders()["emd"].glob("*portraits-emd*"))) == 2, "Build W2W Space calls the folder as before"


@pytest.mark.parametrize("name", [OLD, f"vitrine/{OLD}", f"vitrine\\{OLD}"])
def test_a_saved_prompt_runs(comfy, name):
    """As the server hands it on: its handlers come before validation."""
    from vitrine.nodes.comfy.lora import as_listed

    assert comfy.run(graph("other.safetensors"))[1], "core refuses what is not listed"
    data = as_listed({"prompt": graph(name) | {"4": "no node"}})
    data["prompt"].pop("4")
    assert comfy.run(data["prompt"])[1] is None


async def _open(driver, address, saved):
    async with driver.page(address) as tab:
        await tab.evaluate(f"app.loadGraphData({json.dumps(saved)})")
        await tab.wait_for(f"app.graph._nodes.length === {len(saved['nodes'])}")
        await tab.settle()
        found = "app.graph._nodes.flatMap(n => (n.widgets ?? []).map(w => w.value))"
        return await tab.evaluate(f"{found}.filter(v => String(v).includes('portraits-emd'))"), tab.faults()


def test_a_saved_workflow_opens_with_them(driver, address):
    text = (ROOT / "workflows" / "Sample in one step (demo).json").read_text(encoding="utf-8")
    saved = json.loads(text.replace('"vitrine/vitrine-portraits-emd', '"vitrine-portraits-emd'))
    values, errors = asyncio.run(_open(driver, address, saved))
    assert len(values) == 1 and all(v.startswith("vitrine/vitrine-portraits-emd-") for v in values) and not errors
