"""PCA by shards against scikit-learn, the space's algebra, and its file."""

import threading

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from vitrine.engine.errors import VitrineError
from vitrine.engine.runtime.progress import Interrupted
from vitrine.engine.w2w.space.manifest import LoraLayer, Manifest
from vitrine.engine.w2w.space.principal_components import Matrix, PCAConfig, Workers, principal_components, shards
from vitrine.engine.w2w.space.space import WeightSpace

pytestmark = pytest.mark.rounding
N, D = 40, 6432


@pytest.fixture(scope="module")
def data():
    """Decaying spectrum, uneven column scales, an offset."""
    gen = torch.Generator().manual_seed(0)
    low = torch.randn(N, N, generator=gen) * torch.linspace(3, 0.5, N)
    return low @ torch.randn(N, D, generator=gen) * torch.rand(D, generator=gen).add(0.1) + torch.randn(
        D, generator=gen
    )


@pytest.fixture(scope="module")
def found(data):
    return principal_components(Matrix(data))


def layers(seed=0):
    gen = torch.Generator().manual_seed(seed)
    return {
        f"block.{i}.to_q": LoraLayer(torch.randn(1, 5, generator=gen), torch.randn(7, 1, generator=gen), 27.0)
        for i in range(3)
    }


def space_of(data, found, names=()):
    d = data.shape[1]
    lora = {"only.to_q": LoraLayer(torch.zeros(1, d - 32), torch.zeros(32, 1), 27.0)}
    parts = (found.mean, found.scale, found.basis, found.singular_values, found.coefficients)
    return WeightSpace(Manifest.of(lora), *parts, len(data), names, total_variance=found.total_variance)


def test_equals_scikit_learn(data, found):
    x = data.double().numpy()
    mean, std = x.mean(0), x.std(0, ddof=1)
    reference = PCA(N - 1, svd_solver="full").fit((x - mean) / std)
    assert np.allclose(found.mean.numpy(), mean, atol=1e-6) and np.allclose(found.scale.numpy(), std, atol=1e-6)
    assert np.allclose(found.singular_values.numpy(), reference.singular_values_[: N - 1], rtol=1e-5)
    cosines = np.abs((found.basis.double().numpy() * reference.components_).sum(1))
    assert cosines.min() > 1 - 1e-5
    shares = space_of(data, found).explained.numpy()
    assert np.allclose(shares, reference.explained_variance_ratio_, atol=1e-6)


def test_round_trip_with_all_components(data, found):
    space = space_of(data, found)
    assert len(found.singular_values) == N - 1, "the last singular value is zero and must go"
    assert (space.decode(space.encode(data)) - data).abs().max() < 1e-4
    assert torch.allclose(space.encode(data), found.coefficients, atol=2e-3)


def test_coefficients_have_mean_zero_and_the_spread_the_singular_values_say(data, found):
    beta = found.coefficients
    assert beta.mean(0).abs().max() < 1e-4
    assert torch.allclose(beta.std(0), space_of(data, found).deviations, rtol=1e-5)


@pytest.mark.parametrize("memory", [2**20, 2**22])
def test_shards_in_any_order_give_the_same_space(data, found, memory):
    parts = shards(N, D, memory)
    assert memory > 2**20 or len(parts) >= 6
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(1)).tolist()
    width = parts[0][1]

    class Shuffled(Matrix):
        """Shards come in another order and never the whole matrix."""

        def columns(self, start, stop):
            assert (stop - start) * N * 28 <= memory // 2
            return super().columns(start, stop)

    permuted = torch.cat([torch.arange(D)[parts[i][0] : parts[i][1]] for i in order])
    other = principal_components(Shuffled(data[:, permuted]), PCAConfig(memory=memory))
    assert torch.allclose(other.singular_values, found.singular_values, rtol=1e-6)
    assert ((other.basis * found.basis[:, permuted]).sum(1).abs() > 1 - 1e-5).all() and width


def test_processes_that_share_the_shards_sum_to_the_same(data, found):
    """Three workers one after another, their sums added by hand as all-reduce does."""
    config, sums = PCAConfig(memory=2**20), {}

    barrier, results = threading.Barrier(3), {}

    def work(worker):
        calls = iter(range(100))

        def total(part):
            i = next(calls)
            sums.setdefault(i, {})[worker] = part.clone()
            barrier.wait()
            whole = torch.stack([sums[i][w] for w in range(3)]).sum(0)
            barrier.wait()
            return whole

        results[worker] = principal_components(Matrix(data), config, workers=Workers(worker, 3, total))

    threads = [threading.Thread(target=work, args=(w,)) for w in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for worker in range(3):
        assert torch.allclose(results[worker].singular_values, found.singular_values, rtol=1e-6)
        assert ((results[worker].basis * found.basis).sum(1).abs() > 1 - 1e-5).all()


def test_a_stopped_build_goes_on_where_it_was(data, found, tmp_path):
    state, config, seen = tmp_path / "state.safetensors", PCAConfig(memory=2**20), []

    class Counted(Matrix):
        def columns(self, start, stop):
            seen.append(start)
            return super().columns(start, stop)

    def stop(step, total, preview=None):
        if step == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        principal_components(Counted(data), config, stop, resume=state)
    assert len(seen) == 3
    seen.clear()
    again = principal_components(Counted(data), config, resume=state)
    parts = len(shards(N, D, config.memory))
    assert len(seen) == (parts - 3) + parts, "three shards of the first pass are not read again"
    assert torch.allclose(again.singular_values, found.singular_values, rtol=1e-6)
    with pytest.raises(VitrineError, match="begun with .*other rows.*delete state"):
        principal_components(Matrix(data[:-1]), config, resume=state)


def test_randomised_route_finds_the_leading_components(data, found):
    config = PCAConfig(components=8, route="randomised", memory=2**20, power=12, oversample=16)
    other = principal_components(Matrix(data), config)
    assert torch.allclose(other.singular_values, found.singular_values[:8], rtol=1e-4)
    assert ((other.basis * found.basis[:8]).sum(1).abs() > 1 - 1e-3).all()
    assert abs(other.total_variance / found.total_variance - 1) < 1e-5


def test_constant_columns_and_copies():
    x = torch.randn(5, 20)
    x[:, 3] = 2.0
    found = principal_components(Matrix(x))
    assert torch.isfinite(found.basis).all() and float(found.basis[:, 3].abs().max()) < 1e-6 and found.scale[3] == 1
    with pytest.raises(VitrineError, match="copies of one"):
        principal_components(Matrix(torch.ones(4, 20)))
    with pytest.raises(VitrineError, match="up to 4"):
        principal_components(Matrix(x), PCAConfig(components=5))


def test_negative_deviations_of_the_published_files_change_nothing(data, found):
    space = space_of(data, found)
    flipped = space.scale.clone()
    basis = space.components.clone()
    flipped[::7] *= -1
    basis[:, ::7] *= -1
    from dataclasses import replace

    other = replace(space, scale=flipped, components=basis)
    assert torch.allclose(other.decode(other.encode(data)), space.decode(space.encode(data)), atol=1e-5)


def test_flatten_is_alphabetical_and_row_major():
    lora = layers()
    manifest = Manifest.of(dict(reversed(lora.items())))
    wanted = torch.cat([t.reshape(-1) for path in sorted(lora) for t in (lora[path].down, lora[path].up)])
    assert torch.equal(manifest.flatten(lora), wanted)
    assert Manifest.from_json(manifest.to_json()) == manifest
    back = manifest.lora(wanted)
    assert all(torch.equal(back[p].up, lora[p].up) and torch.equal(back[p].down, lora[p].down) for p in lora)
    halved = {p: LoraLayer(v.down, v.up * 2, 13.5) for p, v in lora.items()}
    assert torch.allclose(manifest.flatten(halved), wanted), "another alpha, the same change of the weights"
    with pytest.raises(VitrineError, match="delta mode"):
        manifest.flatten({p: v for p, v in lora.items() if "0" not in p})


def test_decode_passes_gradients_and_takes_fewer_components(data, found):
    space = space_of(data, found)
    beta = torch.zeros(4, requires_grad=True)
    flat = space.decode(beta)
    assert torch.equal(flat.detach(), space.mean)
    down, up = space.unflatten(flat)["only.to_q"]
    (down.sum() + up.sum()).backward()
    wanted = (space.components[:4] * space.scale).sum(1)
    assert torch.allclose(beta.grad, wanted, rtol=1e-4, atol=1e-3)
    assert space.decode(torch.zeros(2, 3, 5)).shape == (2, 3, D)
    with pytest.raises(VitrineError, match="coefficients"):
        space.decode(torch.zeros(N))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.0), ("float16", 2e-3), ("bfloat16", 8e-3)])
def test_the_file(tmp_path, data, found, dtype, bound):
    from dataclasses import replace

    space = replace(
        space_of(data, found, tuple(f"m{i}" for i in range(N))),
        directions={"smile": torch.ones(N - 1)},
        info={"base": "tiny"},
    )
    again = WeightSpace.load(space.save(tmp_path / "s.w2w.safetensors", dtype))
    flat = space.decode(space.coefficients[3])
    error = (again.decode(space.coefficients[3]) - flat).norm() / flat.norm()
    assert error <= bound and again.identity == space.identity and again.names == space.names
    assert torch.equal(again.directions["smile"], torch.ones(N - 1)) and again.info == {"base": "tiny"}
    assert again.manifest == space.manifest and again.count == N and not list(tmp_path.glob("*.tmp"))
    assert again.first(5).decode(torch.ones(5)).shape == (D,)


def test_files_that_are_refused(tmp_path, data, found):
    from safetensors.torch import save_file

    path = space_of(data, found).save(tmp_path / "s.w2w.safetensors")
    whole = path.read_bytes()
    (tmp_path / "cut.w2w.safetensors").write_bytes(whole[: len(whole) // 2])
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    for name, match in (("cut.w2w", "whole"), ("other", "kind"), ("none", "existing")):
        with pytest.raises(VitrineError, match=match):
            WeightSpace.load(tmp_path / f"{name}.safetensors")
