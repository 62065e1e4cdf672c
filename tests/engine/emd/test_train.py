"""The trainer at tiny size: three roles on one backbone, resume to the bit, exports that load elsewhere."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.emd import ChainEnd, EStepConfig, NoiseLevels, one_step, read_student
from vitrine.engine.emd.networks import GENERATOR, SCORE, Roles
from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from vitrine.engine.errors import VitrineError
from vitrine.engine.jobs.training import mean_gradients
from vitrine_tests.emd_runs import teacher, texts, trainer
from vitrine_tests.hangs import HANGS


def digest(module):
    state = {k: v for k, v in module.state_dict().items() if ".lora_" not in k}
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()


@pytest.mark.nightly
def test_roles_start_equal_and_the_teacher_never_changes(tmp_path):
    base, x, t = teacher(), seeded_noise([1], (4, 8, 8)), 500.0
    with torch.no_grad():
        before = base.predict(x, t, texts(1)).eps
    run = trainer(tmp_path, base)
    kept = digest(base.backbone)
    start = {n: [p.detach().clone() for p in run.roles.parameters(n).values()] for n in (GENERATOR, SCORE)}
    run.run()
    assert run.done == 4 and run.skipped == 0 and run.chain.gz > 0
    assert digest(base.backbone) == kept
    for name, old in start.items():
        now = run.roles.parameters(name).values()
        assert any(not torch.equal(a, b) for a, b in zip(old, now, strict=True)), name
    with torch.no_grad():
        assert torch.equal(run.roles.teacher.predict(x, t, texts(1)).eps, before)
        assert not torch.equal(run.roles.score.predict(x, t, texts(1)).eps, before)
    run.roles.remove()
    with torch.no_grad():
        assert torch.equal(base.predict(x, t, texts(1)).eps, before)


@pytest.mark.nightly
def test_resume_is_the_unbroken_run_to_the_bit(tmp_path):
    trainer(tmp_path / "whole").run()
    trainer(tmp_path / "parts").run(until=2)
    second = trainer(tmp_path / "parts", save_every=3)
    assert second.done == 2
    second.run()
    whole, parts = (load_file(tmp_path / n / "state.safetensors") for n in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    with pytest.raises(VitrineError, match="begun with lr_score 0.0005 .now 1.0"):
        trainer(tmp_path / "parts", lr_score=1.0)


@pytest.mark.nightly
def test_killed_within_a_step_and_resumed(tmp_path):
    script = f"""
        import os, signal, sys
        sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(__file__).parent)!r}]
        import conftest
        from test_train import trainer
        run = trainer({str(tmp_path / "killed")!r}, save_every=2)
        def die(module, args, output):
            if run.done == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        run.roles.generator.backbone.register_forward_hook(die)
        run.run()
    """
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-500:]
    again = trainer(tmp_path / "killed", save_every=2)
    assert again.done == 2, "the last state that was saved whole"
    again.run()
    trainer(tmp_path / "whole", save_every=2).run()
    whole, killed = (load_file(tmp_path / n / "state.safetensors") for n in ("whole", "killed"))
    assert all(torch.equal(whole[k], killed[k]) for k in whole)


@pytest.mark.nightly
def test_export_loads_in_diffusers_both_ways(tmp_path):
    run = trainer(tmp_path, ema=0.0)
    files = run.run()
    z = seeded_noise([1, 2], (4, 8, 8))
    with torch.no_grad():
        wanted = run.generate(z, texts(2))
    preset, tensors = read_student(files[0])
    assert preset == run.preset and preset.steps == 2 and preset.trained_guidance == 2.0
    assert sum(k.endswith(".alpha") for k in tensors) * 3 == len(tensors)
    for file in files:
        base = teacher()
        if file.name.endswith("diffusers.safetensors"):
            base.backbone.load_lora_adapter(load_file(file), prefix="unet")
        else:
            merge(base.backbone, tensors)
        with torch.no_grad():
            found = one_step(base, z, texts(2), preset)
        assert (found - wanted).abs().max() / wanted.abs().max() < 2e-3, "the files are float16"


def merge(unet, tensors):
    """kohya's rule: weight + alpha / rank * up down."""
    modules = {"lora_unet_" + n.replace(".", "_"): m for n, m in unet.named_modules()}
    for key in (k for k in tensors if k.endswith("lora_down.weight")):
        stem = key.split(".")[0]
        down, up = tensors[key].float(), tensors[f"{stem}.lora_up.weight"].float()
        scale = float(tensors[f"{stem}.alpha"]) / len(down)
        product = (up.flatten(1) @ down.flatten(1)).view(modules[stem].weight.shape)
        modules[stem].weight.data += scale * product


@pytest.mark.nightly
def test_nonfinite_steps_are_skipped_and_counted(tmp_path):
    run = trainer(tmp_path)
    before = [p.detach().clone() for p in run.roles.parameters(SCORE).values()]
    run.roles.train_only(SCORE)
    run._update(SCORE, sum(p.sum() for p in run.roles.parameters(SCORE).values()) * float("nan"))
    assert run.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before, run.roles.parameters(SCORE).values(), strict=True))
    r = torch.randn(2, 4, 8, 8)
    r[1, 0, 0, 0] = float("inf")
    one = torch.ones(2, 1, 1, 1)
    end = ChainEnd(r, r.nan_to_num(posinf=0), r, r, 0 * r.nan_to_num())
    run._update(GENERATOR, run._m_step(end, texts(2), NoiseLevels(one, one)))
    assert run.skipped == 2 and all(bool(torch.isfinite(p).all()) for p in run.roles.parameters(GENERATOR).values())


@pytest.mark.nightly
def test_diff_instruct_and_its_call_count(tmp_path):
    base, rows = teacher(), []
    run = trainer(tmp_path / "a", base, chain=EStepConfig.diff_instruct(), guidance=1.0, weight="uniform")
    assert run.chain == EStepConfig.diff_instruct()
    base.backbone.register_forward_hook(lambda m, i, o: rows.append(len(i[0])))
    run.step()
    assert rows == [2] * 6, "g, score; g, teacher, score; g"
    assert EMDTrainConfig.from_dict(run.config.to_dict()) == run.config


def test_roles_need_a_diffusers_network():
    with pytest.raises(VitrineError, match="diffusers UNet"):
        Roles(Denoiser(torch.nn.Identity(), teacher().schedule, "eps", lambda x, t, c: x), 2)


# --- cost ---------------------------------------------------------------------------------------------------------
def forward_equivalents(run):
    """Of one step: a forward is 1, a backward through the activations 1, and 1 more where weights take gradients."""
    total, batch = [], run.config.batch

    def seen(module, args, output):
        share, learns = len(args[0]) / batch, any(p.requires_grad for p in module.parameters())
        total.append(share)
        if output[0].requires_grad:
            output[0].register_hook(lambda g: total.append(share * (1 + learns)))

    handle = run.roles.net.register_forward_hook(seen)
    run.step()
    handle.remove()
    return sum(total)


@pytest.mark.nightly
@pytest.mark.parametrize(("guidance", "teacher_rows"), [(1.0, 1), (3.0, 2)])
def test_a_step_costs_what_the_algorithm_costs(tmp_path, guidance, teacher_rows):
    how = {"guidance": guidance, "auto_gz": False}
    for k in (1, 2, 4, 8):
        # score update 1 + 3; each Langevin step: generator 1, its vjp 1, teacher 1 (2 guided), score 1; M-step 3
        wanted = 4 + k * (3 + teacher_rows) + 3
        found = forward_equivalents(trainer(tmp_path / f"{k}", chain=EStepConfig(k, 0.16, 0.01), **how))
        assert abs(found / wanted - 1) < 0.15, (k, found, wanted)
        frozen = forward_equivalents(trainer(tmp_path / f"{k} frozen", chain=EStepConfig(k, gz=0.0), **how))
        assert abs(frozen / (4 + k * (1 + teacher_rows) + 3) - 1) < 0.15, "z held: one generator call serves the chain"


# --- memory -------------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_checkpointing_changes_no_weight(tmp_path):
    states, calls = [], {False: 0, True: 0}
    for on in calls:
        run = trainer(
            tmp_path / str(on),
            steps=3,
            chain=EStepConfig(2, 0.16, 0.01),
            auto_gz=False,
            checkpointing=on,
            lr_generator=1e-3,
            lr_score=1e-2,
        )

        def count(module, args, on=on):
            calls[on] += 1

        run.roles.generator.backbone.down_blocks[0].resnets[0].register_forward_pre_hook(count)
        run.run()
        states.append(load_file(tmp_path / str(on) / "state.safetensors"))
    off, on = states
    assert calls[True] > calls[False], "activations are computed again"
    assert all((off[k] - on[k]).abs().max() < 1e-6 for k in off if k.startswith(("weight/", "average/")))


@pytest.mark.nightly
def test_bfloat16_networks_and_a_float32_chain(tmp_path):
    base, z = teacher(), seeded_noise([1, 2], (4, 8, 8))
    kept, samples = digest(base.backbone), {}
    for dtype in ("float32", "bfloat16"):
        run = trainer(
            tmp_path / dtype,
            base if dtype == "bfloat16" else None,
            steps=3,
            dtype=dtype,
            chain=EStepConfig(2, 0.16, 0.01),
            auto_gz=False,
        )
        run.run()
        with torch.no_grad():
            samples[dtype] = run.generate(z, texts(2))
        state = load_file(tmp_path / dtype / "state.safetensors")
        assert run.skipped == 0 and run.done == 3
        assert {v.dtype for k, v in state.items() if not k.startswith("random/")} == {torch.float32}
        assert all(bool(torch.isfinite(v).all()) for k, v in state.items() if k != "random")
    assert run.roles.net.conv_in.weight.dtype == torch.bfloat16 and base.backbone.conv_in.weight.dtype == torch.float32
    assert digest(base.backbone) == kept, "the caller's own network is left alone"
    assert samples["bfloat16"].dtype == torch.float32
    difference = (samples["bfloat16"] - samples["float32"]).norm() / samples["float32"].norm()
    assert 0 < difference < 0.05, difference


# --- settings -----------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_each_score_update_has_a_batch_of_its_own(tmp_path):
    run, seen = trainer(tmp_path, score_updates=3, auto_gz=False), []  # calibrating makes score updates, too
    update = run._score_update
    run._score_update = lambda cond, z: seen.append((cond.text, z)) or update(cond, z)
    run.step()
    assert len(seen) == 3
    assert not any(torch.equal(seen[i][1], seen[j][1]) for i, j in ((0, 1), (0, 2), (1, 2)))
    run.step()
    assert len({tuple(text.flatten().tolist()) for text, _ in seen}) > 1, "prompts as well"


@pytest.mark.nightly
def test_z_moves_unless_it_is_told_to_stay(tmp_path):
    assert trainer(tmp_path / "given", auto_gz=False).chain.gz == 0.01
    assert trainer(tmp_path / "measured").chain.gz > 0
    assert trainer(tmp_path / "frozen", chain=EStepConfig(2, gz=0.0)).chain.gz == 0, "also with auto_gz"
    assert EMDTrainConfig().advanced.weight == "uniform", "EMD's own"


def test_rare_settings_may_stand_at_the_top_level_and_some_may_change():
    flat = {"steps": 4, "guidance": 2.0, "chain": {"steps": 2, "gz": 0.0}, "auto_gz": False, "ema": 0.9, "decay": 0.5}
    config = EMDTrainConfig.from_dict(flat)
    advanced = EMDAdvancedConfig(False, "uniform", 0.9, 0.5)
    assert config == EMDTrainConfig(4, chain=EStepConfig(2, gz=0.0), guidance=2.0, advanced=advanced)
    assert EMDTrainConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    longer = EMDTrainConfig.from_dict(flat | {"steps": 8, "checkpointing": True, "save_every": 7})
    assert longer.differences(config) == ["steps 4 (now 8)"], "its rates fall towards another end"
    steady = EMDTrainConfig.from_dict(flat | {"decay": 0.0})
    assert not EMDTrainConfig.from_dict(flat | {"decay": 0.0, "steps": 8, "save_every": 1}).differences(steady)
    measured = EMDTrainConfig.from_dict(flat | {"auto_gz": True})
    fixed = EMDTrainConfig.from_dict(flat | {"chain": {"steps": 2, "gz": 0.01, "clip": 20.0}})
    walked = EStepConfig(2, gz=0.01, clip=20.0)
    assert not fixed.differences(measured, walked), "the gz that the run measured may be written out"
    assert not replace(measured, chain=EStepConfig(2)).differences(measured, walked), "or be left to the run"
    assert [d.split()[0] for d in config.differences(measured, walked)] == ["chain"]
    assert [d.split()[0] for d in measured.differences(config, config.chain)] == ["auto_gz"]


# --- processes ----------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_two_processes_average_their_gradients(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(__file__).parent)!r}]
        import conftest
        from safetensors.torch import save_file
        from test_train import trainer
        run = trainer({str(tmp_path / "two")!r}, steps=3, batch=4)
        assert run.accelerator.num_processes == 2
        run.run()
        own = run.roles.parameters("generator") | run.roles.parameters("score")
        file = {str(tmp_path)!r} + f"/process{{run.accelerator.process_index}}.safetensors"
        save_file({{k: p.detach().contiguous() for k, p in own.items()}}, file, {{"gz": repr(run.chain.gz)}})
    """)
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(launch, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=HANGS)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    first, second = (load_file(tmp_path / f"process{i}.safetensors") for i in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)
    one = trainer(tmp_path / "one", steps=3, batch=4)
    one.run()
    z = seeded_noise([1, 2], (4, 8, 8))
    other = trainer(tmp_path / "two", steps=3, batch=4)  # one process goes on where two stopped
    assert other.done == 3
    with torch.no_grad():
        start = one_step(teacher(), z, texts(2), one.preset)
        alone, shared = one.generate(z, texts(2)), other.generate(z, texts(2))
    assert (alone - shared).norm() < 0.01 * (alone - start).norm(), "the batch is the same, however it is shared"


@pytest.mark.nightly
def test_goes_on_from_an_exported_student_with_falling_rates(tmp_path):
    first = trainer(tmp_path / "first")
    files = first.run()
    kohya = next(f for f in files if f.name.endswith("_kohya.safetensors"))
    second = trainer(tmp_path / "second", decay=0.5)
    second.start_from(kohya, tmp_path / "first" / "score_kohya.safetensors")
    for name, theirs in ((GENERATOR, first.average.values), (SCORE, first.roles.parameters(SCORE))):
        for key, value in second.roles.parameters(name).items():
            assert torch.equal(value, theirs[key].detach().half().float()), key
    rates = []
    for _ in range(4):
        second.step()
        rates.append(second.optimizers[GENERATOR].param_groups[0]["lr"])
    full = second.config.lr_generator
    assert rates == pytest.approx([full, full, full, full / 2])
    with pytest.raises(VitrineError, match="rank"):
        trainer(tmp_path / "third", rank=4).start_from(kohya)
    with pytest.raises(VitrineError, match="decay"):
        EMDAdvancedConfig(decay=2.0)


def test_gradients_are_exchanged_together():
    """A LoRA has hundreds of small matrices; each took a round of its own."""
    sizes, sent = [(3, 4), (2,), (5, 5), (4,)], []
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for i, p in enumerate(parameters):
        p.grad = None if i == 1 else torch.full(sizes[i], float(i + 1))

    def halved(flat):
        sent.append(len(flat))
        return flat / 2

    mean_gradients(parameters, halved)
    assert sent == [12 + 2 + 25 + 4]
    assert [float(p.grad.unique()) for p in parameters] == [0.5, 0.0, 1.5, 2.0]
    assert [p.grad.shape for p in parameters] == [p.shape for p in parameters]
    sent.clear()
    mean_gradients(parameters, halved, pieces=20)
    assert sent == [14, 25, 4]
    parameters[3].data = parameters[3].data.double()
    parameters[3].grad = torch.ones(4, dtype=torch.float64)
    sent.clear()
    mean_gradients(parameters, halved)
    assert sent == [39, 4] and parameters[3].grad.dtype == torch.float64
