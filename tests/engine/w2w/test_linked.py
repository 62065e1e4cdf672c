"""Delta spaces whose factors stay in the LoRA files: the same space, with one layer in memory."""

import shutil

import pytest
import torch
from vitrine.cli.w2w_models import Writing
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import (
    BuildConfig,
    W2WModel,
    build_space,
    change_kept,
    encode,
    fraction_kept,
    load_space,
    materialise,
    read_lora,
    write_lora,
)
from vitrine.engine.w2w.space.build_state import BuildState
from vitrine.engine.w2w.space.factor_stacks import PRODUCTS, TOGETHER, Stack, gram, multiplications
from vitrine.engine.w2w.space.linked_factors import linked_files
from vitrine_tests.engine.small_loras import SHAPES, Held, deltas, lora, same


@pytest.fixture
def folder(tmp_path):
    """Mixed ranks, one without a layer."""
    for i, (rank, alpha) in enumerate([(1, 27.0), (2, 1.0), (4, 4.0), (8, 16.0), (2, 2.0)]):
        layers = lora(i, rank=rank, alpha=alpha)
        if i == 3:
            layers.pop(next(iter(SHAPES)))
        write_lora(tmp_path / "loras" / f"m{i}.safetensors", layers)
    return tmp_path / "loras"


def test_a_linked_space_is_the_space_of_the_same_files(folder, tmp_path):
    captured = build_space(folder, BuildConfig("delta")).space
    linked = build_space(folder, BuildConfig("delta", linked=True)).space
    assert linked.identity == captured.identity and torch.equal(linked.gram, captured.gram)
    path = linked.save(tmp_path / "spaces" / "a.w2w.safetensors")
    assert path.stat().st_size < 8_000 < captured.save(tmp_path / "b.w2w.safetensors").stat().st_size
    again = load_space(path)
    beta = torch.tensor([0.3, -1.0, 0.2, 0.1]) * captured.deviations
    for space in (linked, again):
        assert same(deltas(space.lora(beta)), deltas(captured.lora(beta)), 1e-6)
        assert same(deltas(space.lora(beta, 2)), deltas(captured.lora(beta, 2)), 1e-6)
        other = read_lora(folder / "m2.safetensors")
        a, b = encode(space, other), encode(captured, other)
        assert torch.equal(a.model.coefficients, b.model.coefficients) and a.captured == pytest.approx(1, abs=1e-6)
    shutil.move(tmp_path / "loras", tmp_path / "elsewhere")
    with pytest.raises(VitrineError, match="m0.safetensors, which is missing"):
        load_space(path)
    shutil.move(tmp_path / "elsewhere", tmp_path / "loras")
    write_lora(folder / "m1.safetensors", lora(77, rank=2))
    with pytest.raises(VitrineError, match="m1.safetensors, which is another file"):
        load_space(path)


def test_a_lora_that_is_replaced_is_never_read_as_the_old_one(folder, tmp_path):
    """One number at the file's beginning was not seen by the next load, nor any by a space that was open."""
    space = build_space(folder, BuildConfig("delta", linked=True)).space
    path = space.save(tmp_path / "a.w2w.safetensors")
    opened = load_space(path)
    assert {p.name for p in linked_files(path)} == {p.name for p in folder.iterdir()}
    large = folder / "m1.safetensors"
    content = bytearray(large.read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    content[first + 3] ^= 1
    large.write_bytes(content)
    with pytest.raises(VitrineError, match="m1.safetensors, which was replaced since the space was opened"):
        materialise(opened, torch.zeros(4))
    with pytest.raises(VitrineError, match="m1.safetensors, which is another file"):
        load_space(path)


def test_space_and_loras_may_move_together(folder, tmp_path):
    linked = build_space(folder, BuildConfig("delta", linked=True)).space
    linked.save(tmp_path / "a.w2w.safetensors")
    (tmp_path / "new").mkdir()
    for name in ("loras", "a.w2w.safetensors"):
        shutil.move(tmp_path / name, tmp_path / "new" / name)
    again = load_space(tmp_path / "new" / "a.w2w.safetensors")
    members = [deltas(read_lora(file)) for file in sorted((tmp_path / "new" / "loras").iterdir())]
    mean = {p: sum(v.get(p, torch.zeros(shape)) for v in members) / 5 for p, shape in SHAPES.items()}
    assert same(deltas(again.lora(torch.zeros(4))), mean)


def test_how_much_the_space_holds_equals_the_formed_difference(folder):
    captured = build_space(folder, BuildConfig("delta")).space.first(2)
    other = lora(99, rank=3)
    encoded = encode(captured, other)
    missed = deltas(captured.lora(encoded.model.coefficients[0]))
    whole = deltas(other)
    off = sum(float((whole[p] - missed[p]).square().sum()) for p in SHAPES) / sum(
        float(v.square().sum()) for v in whole.values()
    )
    assert encoded.captured == pytest.approx(max(0.0, 1 - off), abs=1e-5)


def test_one_layer_is_read_at_a_time_and_a_stopped_build_goes_on(folder, tmp_path, monkeypatch):
    from vitrine.engine.w2w.space import build_state

    monkeypatch.setattr(build_state, "SAVE_SECONDS", 0.0)
    whole = build_space(folder, BuildConfig("delta")).space
    stacks = build_space(folder, BuildConfig("delta", linked=True)).space.stacks
    file, read = tmp_path / "products.safetensors", []

    def stop(step, total, preview=None):
        read.append(step)
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gram(stacks, stop, state=BuildState(file, PRODUCTS, {"a": 1}))
    again = BuildState(file, PRODUCTS, {"a": 1})
    assert again.tensors["done"].tolist() == [1, 1, 0]
    assert torch.equal(gram(stacks, lambda step, total, preview=None: read.append(step), state=again), whole.gram)
    assert read == [1, 2, 3]
    with pytest.raises(VitrineError, match="begun with a 1 .now 2"):
        BuildState(file, PRODUCTS, {"a": 2})


@pytest.mark.parametrize("memory", [1, 100_000, 2**31])
def test_both_ways_to_the_products(memory):
    """Many factors of few LoRAs are cheaper formed, few of many by pairs; both equal the products formed at once."""
    for count, rank in ((3, 40), (70, 1)):
        loras = [lora(i, rank=rank) for i in range(count)]
        stacks = {p: Stack.of(p, loras) for p in SHAPES}
        formed = torch.stack([torch.cat([v.flatten() for v in deltas(x).values()]) for x in loras]).double()
        products = gram(stacks, memory=memory)
        assert (products - formed @ formed.T).norm() / products.norm() < 1e-6
        assert (products - products.T).abs().max() <= 1e-12 * products.abs().max()  # eigh reads one triangle


def test_a_model_of_more_factors_than_stand_side_by_side():
    path, count = next(iter(SHAPES)), TOGETHER // 1000 + 2
    stack = Stack.of(path, [lora(i, rank=1000) for i in range(count)])
    shares = torch.linspace(-1, 1, count)
    wanted = sum(c * lora(i, rank=1000)[path].delta().double() for i, c in enumerate(shares.tolist()))
    assert len(stack.down) > TOGETHER
    assert (stack.total(shares) - wanted).norm() / wanted.norm() < 1e-6


def test_formed_changes_stay_within_the_memory():
    """8 LoRAs of rank 64 on 400 x 400, formed some rows at a time: all at once would take 10 MB."""
    stacks = {"a.to_q": Stack.of("a.to_q", [lora(i, 64, shapes={"a.to_q": (400, 400)}) for i in range(8)])}
    paired, formed = multiplications(8, 512, 400, 400)
    budget, factors = 2**22, 4 * sum(v.down.numel() + v.up.numel() for v in stacks.values())
    with Held() as captured:
        products = gram(stacks, memory=budget)
    assert formed < paired and captured.most <= budget + factors
    assert torch.allclose(products, gram(stacks), rtol=1e-12)


def test_a_model_of_few_factors_is_written_without_the_whole_one(tmp_path, capsys):
    """Whole, each of these large layers would be two matrices; the share that few factors keep needs none of them."""
    shapes = {f"mid_block.attentions.0.transformer_blocks.{i}.attn1.to_q": (600, 600) for i in range(8)}
    for i in range(7):
        write_lora(tmp_path / "loras" / f"m{i}.safetensors", lora(i, rank=48, alpha=48.0, shapes=shapes))
    space = build_space(tmp_path / "loras", BuildConfig("delta", linked=True)).space
    beta = space.deviations[None] * 0.7
    with Held() as captured:
        Writing(tmp_path / "new", rank=4).write(space, W2WModel(beta, space.identity), ["new"])
    few, whole = materialise(space, beta[0], 4), materialise(space, beta[0])
    layers = sum(4 * (v.down.numel() + v.up.numel()) for v in whole.values())
    assert captured.most < 0.6 * layers, (captured.most, layers)
    share = change_kept(space, beta[0], few)
    assert 0 < share < 1 and share == pytest.approx(fraction_kept(whole, few), abs=1e-6)
    assert f"rank 4 keeps {share:.1%} of the change" in capsys.readouterr().out
