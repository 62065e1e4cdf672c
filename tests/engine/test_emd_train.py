"""The trainer at tiny size: three roles on one backbone, resume to the bit, exports that load elsewhere."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from safetensors.torch import load_file
from vitrine.engine.denoiser import Condition, Denoiser
from vitrine.engine.emd import ChainEnd, EStepConfig, one_step, read_student, seeded
from vitrine.engine.emd.roles import GENERATOR, SCORE, Roles
from vitrine.engine.emd.train import EMDTrainConfig, Trainer
from vitrine.engine.errors import VitrineError

SMALL = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "norm_num_groups": 4,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
         "layers_per_block": 1, "cross_attention_dim": 8, "attention_head_dim": 2}  # fmt: skip
FAST = {"batch": 2, "rank": 2, "save_every": 1, "guidance": 2.0}


def teacher():
    torch.manual_seed(0)
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    return Denoiser.from_diffusers(UNet2DConditionModel(**SMALL).eval(), scheduler)


def texts(count=4):
    return Condition(torch.randn(count, 5, 8, generator=torch.Generator().manual_seed(9)))


def trainer(folder, base=None, **how):
    config = EMDTrainConfig(**{"steps": 4, "chain": EStepConfig(2)} | FAST | how)
    return Trainer(base or teacher(), texts(), (4, 8, 8), config, folder, texts(1))


def digest(module):
    state = {k: v for k, v in module.state_dict().items() if ".lora_" not in k}
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()


def test_roles_start_equal_and_the_teacher_never_changes(tmp_path):
    base, x, t = teacher(), seeded([1], (4, 8, 8)), 500.0
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


def test_resume_is_the_unbroken_run_to_the_bit(tmp_path):
    trainer(tmp_path / "whole").run()
    trainer(tmp_path / "parts").run(until=2)
    second = trainer(tmp_path / "parts")
    assert second.done == 2
    second.run()
    whole, parts = (load_file(tmp_path / n / "state.safetensors") for n in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    with pytest.raises(VitrineError, match="these settings"):
        trainer(tmp_path / "parts", lr_score=1.0)


def test_killed_and_resumed(tmp_path):
    script = f"""
        import os, signal, sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
        import conftest
        from test_emd_train import trainer
        def die(step, total, preview=None):
            if step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        trainer({str(tmp_path / "killed")!r}).run(die)
    """
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-500:]
    trainer(tmp_path / "killed").run()
    trainer(tmp_path / "whole").run()
    whole, killed = (load_file(tmp_path / n / "state.safetensors") for n in ("whole", "killed"))
    assert all(torch.equal(whole[k], killed[k]) for k in whole)


def test_export_loads_in_diffusers_both_ways(tmp_path):
    run = trainer(tmp_path, ema=0.0)
    files = run.run()
    z = seeded([1, 2], (4, 8, 8))
    with torch.no_grad():
        wanted = run.generate(z, texts(2))
    contract, tensors = read_student(files[0])
    assert contract == run.contract and contract.steps == 2 and contract.trained_guidance == 2.0
    assert sum(k.endswith(".alpha") for k in tensors) * 3 == len(tensors)
    for file in files:
        base = teacher()
        if file.name.endswith("diffusers.safetensors"):
            base.backbone.load_lora_adapter(load_file(file), prefix="unet")
        else:
            merge(base.backbone, tensors)
        with torch.no_grad():
            found = one_step(base, z, texts(2), contract)
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


def test_nonfinite_steps_are_skipped_and_counted(tmp_path):
    run = trainer(tmp_path)
    before = [p.detach().clone() for p in run.roles.parameters(SCORE).values()]
    run.roles.learn(SCORE)
    run._update(SCORE, sum(p.sum() for p in run.roles.parameters(SCORE).values()) * float("nan"))
    assert run.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before, run.roles.parameters(SCORE).values(), strict=True))
    r = torch.randn(2, 4, 8, 8)
    r[1, 0, 0, 0] = float("inf")
    one = torch.ones(2, 1, 1, 1)
    run._generator_update(ChainEnd(r, r.nan_to_num(posinf=0), r, r, 0 * r.nan_to_num()), texts(2), one, one)
    assert run.skipped == 2 and all(bool(torch.isfinite(p).all()) for p in run.roles.parameters(GENERATOR).values())


def test_diff_instruct_switch_meter_and_call_count(tmp_path):
    base, rows = teacher(), []
    run = trainer(tmp_path / "a", base, chain=EStepConfig.diff_instruct(), guidance=1.0, weight="uniform")
    assert run.chain == EStepConfig.diff_instruct()
    base.backbone.register_forward_hook(lambda m, i, o: rows.append(len(i[0])))
    run.step()
    assert rows == [2] * 6, "g, score; g, teacher, score; g"
    metered = trainer(tmp_path / "b", meter_every=1)
    metered.step()
    assert set(metered.meter) == {"cancel-raw", "cancel-last", "raw-last"}
    assert EMDTrainConfig.from_dict(metered.config.to_dict()) == metered.config


def test_roles_need_a_diffusers_network():
    with pytest.raises(VitrineError, match="diffusers UNet"):
        Roles(Denoiser(torch.nn.Identity(), teacher().schedule, "eps", lambda x, t, c: x), 2)
