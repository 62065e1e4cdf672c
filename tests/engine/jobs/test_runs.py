"""Jobs that resume: other inputs are refused by name, killed ones end with the same bytes, one owner, no leftovers."""

import json
import multiprocessing
import os
import signal
from dataclasses import fields

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.files import save_safetensors, write_text, write_whole
from vitrine.engine.io.temporary_files import TEMPORARY
from vitrine.engine.jobs.digests import digest
from vitrine.engine.jobs.run import NOTE, STATE, Run
from vitrine.engine.network.condition import Condition
from vitrine_tests.killed import killed, killing, one_thread
from vitrine_tests.run_jobs import CONTROL_SETTINGS, EMD_SETTINGS, JOBS, other_unet, unet, with_lora


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Name of a job -> the folder in which it was run with its own inputs."""
    folders = {}

    def of(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("jobs") / name.replace(" ", "-")
            JOBS[name].call(folders[name])
        return folders[name]

    return of


CASES = [(name, changed) for name, job in JOBS.items() for changed in job.others]


@pytest.mark.parametrize(("name", "changed"), CASES)
def test_another_input_is_refused(begun, name, changed):
    """All wordings are one: what was changed, what is accepted, what to do."""
    job, folder = JOBS[name], begun(name)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}
    with pytest.raises(VitrineError, match=r"^run: given .*begun with .*; accepted: the inputs .* start again: "):
        job.call(folder, **{changed: job.others[changed]})
    assert all(p.read_bytes() == kept for p, kept in before.items()), "nothing was touched"


@pytest.mark.nightly
@pytest.mark.parametrize("name", JOBS)
def test_a_killed_job_ends_with_the_same_bytes(tmp_path, name):
    job = JOBS[name]
    killed(lambda: job.call(tmp_path / "killed", killing(job.kill)))
    with one_thread():
        resumed, whole = job.call(tmp_path / "killed"), job.call(tmp_path / "whole")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[k], v) for k, v in whole.items())
    assert not list(tmp_path.rglob(f"*{TEMPORARY}"))


@pytest.mark.parametrize(
    ("name", "total"),
    [pytest.param("EMD", EMD_SETTINGS.steps, marks=pytest.mark.nightly), ("control", CONTROL_SETTINGS.steps)],
)
def test_until_is_how_many_steps_are_done_in_all(tmp_path, name, total):
    """0 trained to the end."""
    from vitrine.engine.jobs.run import state_facts

    job = JOBS[name]
    made = lambda: {k: v() if callable(v) else v for k, v in job.inputs.items()}  # noqa: E731

    def run(until):
        job.run(tmp_path, progress=lambda *_: None, until=until, **made())

    for until in (0, 1, total, total + 1):
        run(until)
        facts = state_facts(tmp_path)
        assert facts.get("done", facts.get("step")) == min(until, total)
    run(0)
    assert state_facts(tmp_path).get("done", state_facts(tmp_path).get("step")) == total, "nor does it go back"


# --- identity -----------------------------------------------------------------------------------------------------
def test_a_network_is_known_by_all_that_it_computes_with(tmp_path):
    from peft import LoraConfig, inject_adapter_in_model

    plain = digest(unet())
    different = {digest(net) for net in (other_unet(), with_lora(), with_lora(0.5), unet().half())}
    assert len(different | {plain}) == 5
    net = unet()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_k"]), net)
    for module in net.modules():
        if hasattr(module, "base_layer"):
            module.enable_adapters(False)
    assert digest(net) != plain, "an adapter that is off may be put on"
    assert digest(unet().to(memory_format=torch.channels_last)) == plain, "nor does where numbers lie"
    net = unet()
    net.register_to_config(attention_head_dim=4)
    assert digest(net) != plain, "one that reads its weights otherwise"
    with pytest.raises(VitrineError, match="input: given object"):
        digest({"what": object()})


def test_a_condition_is_known_by_every_field():
    whole = {
        "text": torch.zeros(1, 2, 3),
        "pooled": torch.zeros(1, 4),
        "extra": {"time_ids": torch.zeros(1, 6)},
        "fixed": {"controlnet_block_samples": [torch.zeros(1, 2)], "guidance": 3.5},
    }
    assert set(whole) == {field.name for field in fields(Condition)}
    others = {
        "text": torch.ones(1, 2, 3),
        "pooled": None,
        "extra": {"time_ids": torch.ones(1, 6)},
        "fixed": {"controlnet_block_samples": [torch.ones(1, 2)], "guidance": 3.5},
    }
    made = [digest(Condition(**whole | {name: value})) for name, value in others.items()]
    assert digest(Condition(**whole)) == digest(Condition(**whole)) and len({*made, digest(Condition(**whole))}) == 5


def test_a_refusal_names_what_changed_and_keeps_the_state(tmp_path):
    inputs = {"network": unet(), "pictures": [torch.zeros(3)], "settings": {"lr": 0.1, "steps": 5}}
    with Run(tmp_path / "work", "job", inputs) as run:
        run.save({"weight": {"a": torch.ones(2)}}, facts={"done": 1})
    changed = {"network": other_unet(), "pictures": [torch.ones(3)], "settings": {"lr": 0.2, "steps": 5}}
    with pytest.raises(VitrineError) as error, Run(tmp_path / "work", "another job", changed):
        raise AssertionError("entered")
    for change in ("other network;", "lr 0.1 (now 0.2);", "other pictures", "job job (now another job)"):
        assert change in str(error.value), error.value
    assert "steps" not in str(error.value)
    assert "empty work" in str(error.value)
    assert Run(tmp_path / "work", "job", inputs).load().facts == {"done": 1}
    note = json.loads((tmp_path / "work" / NOTE).read_text())
    note["library"] = "torch 1.0"
    (tmp_path / "work" / NOTE).write_text(json.dumps(note))
    with pytest.raises(VitrineError, match=r"library torch 1\.0 \(now torch "):
        Run(tmp_path / "work", "job", inputs).load()


def test_states_of_unknown_inputs_are_refused(tmp_path):
    save_safetensors(tmp_path / STATE, {"a": torch.ones(1)}, {"facts": "{}"})
    with pytest.raises(VitrineError, match="does not say what it was begun with; .*start again"):
        Run(tmp_path, "job", {}).load()
    save_safetensors(tmp_path / "other.safetensors", {"a": torch.ones(1)}, {"facts": "{}"})
    with pytest.raises(VitrineError, match=r"does not say what it was begun with; .*delete other\.safetensors"):
        Run(tmp_path / "other.safetensors", "job", {}).load()


def test_a_state_says_itself_what_it_is_of(tmp_path):
    """A trainer that is stepped and saved by hand never enters its run."""
    Run(tmp_path, "job", {"pictures": "these"}).save({}, facts={"done": 2})
    assert Run(tmp_path, "job", {"pictures": "these"}).load().facts == {"done": 2}
    with pytest.raises(VitrineError, match="begun with pictures these .now those"):
        Run(tmp_path, "job", {"pictures": "those"}).load()


def test_a_folder_without_work_belongs_to_nobody(tmp_path):
    with Run(tmp_path, "job", {"pictures": "these"}):
        pass
    with Run(tmp_path, "job", {"pictures": "those"}) as run:
        run.save({})
    assert Run(None, "job", {"network": object()}).load() is None, "without a place nothing is read"


def test_a_state_that_another_process_went_on_with_is_not_written_over(tmp_path):
    first, second = (Run(tmp_path, "job", {}) for _ in range(2))
    assert first.load() is None
    with second:
        second.save({}, facts={"done": 3})
    with pytest.raises(VitrineError, match="another process has continued"), first:
        raise AssertionError("entered")


# --- temporary files ----------------------------------------------------------------------------------------------
def writes_for_ever(path, said):
    def write(scratch):
        write_text_to(scratch)
        said.send("written")
        signal.pause()

    write_whole(path, write)


def write_text_to(path):
    with open(path, "w", encoding="utf-8") as file:
        file.write("half")


def test_what_a_killed_process_was_writing_is_swept(tmp_path):
    """By the next run in the folder, and by whoever writes the same file; what is being written now stays."""
    fork = multiprocessing.get_context("fork")
    heard, said = fork.Pipe(duplex=False)
    targets = [tmp_path / "work" / "below" / "table", tmp_path / "space.safetensors"]
    writers = [fork.Process(target=writes_for_ever, args=(path, said)) for path in targets]
    for writer in writers:
        writer.start()
        assert heard.poll(60) and heard.recv() == "written"
    leftovers = lambda: [p for p in tmp_path.rglob("*") if p.name.endswith(TEMPORARY)]  # noqa: E731
    with Run(tmp_path / "work", "job", {}):
        save_safetensors(targets[1], {"a": torch.ones(1)})
    assert len(leftovers()) == 2, "both are being written"
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    write_text(tmp_path / "work" / "other", "x")
    assert len(leftovers()) == 2
    with Run(tmp_path / "work", "job", {}):
        assert len(leftovers()) == 1
    save_safetensors(targets[1], {"a": torch.ones(1)})
    assert not leftovers()
    write_text(tmp_path / ("x" * 240), "a name as long as file systems allow")
