"""Spaces and models whose header is the metadata itself, as first written: they load, and equal the new ones."""

import json

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import DeltaSpace, W2WModel, WeightSpace, load_space, sample, with_directions


def old_form(path, tensors, kind, header):
    metadata = {"format": "pt", "kind": kind, "version": "1", **header}
    save_file({k: v.detach().contiguous().clone() for k, v in tensors.items()}, path, metadata)
    return path


def old_space(path, space):
    tensors = {"mean": space.mean, "std": space.scale, "V": space.components, "S": space.singular_values}
    tensors |= {"proj": space.coefficients} | {f"dir.{label}": d for label, d in space.directions.items()}
    header = {
        "mode": "factors", "manifest": space.manifest.to_json(), "count": str(space.count),
        "names": json.dumps(list(space.names)), "total_variance": repr(space.total_variance),
        "identity": space.identity, "info": json.dumps(dict(space.info)),
    }  # fmt: skip
    return old_form(path, tensors, "vitrine.w2w.space", header)


def old_delta_space(path, space):
    tensors = {"Q": space.vectors, "S": space.singular_values, "G": space.gram}
    for name, stack in space.stacks.items():
        tensors |= {f"down/{name}": stack.down, f"up/{name}": stack.up, f"ranks/{name}": stack.ranks.to(torch.int32)}
    tensors |= {f"dir.{label}": d for label, d in space.directions.items()}
    header = {
        "mode": "delta", "names": json.dumps(list(space.names)), "info": json.dumps(dict(space.info)),
        "identity": space.identity, "total_variance": repr(space.total_variance),
    }  # fmt: skip
    return old_form(path, tensors, "vitrine.w2w.space", header)


def same(a, b):
    """All fields of two spaces bit for bit; the weights made of them to what MKL rounds elsewhere in memory."""
    assert type(a) is type(b) and a.identity == b.identity and a.names == b.names and dict(a.info) == dict(b.info)
    assert a.total_variance == b.total_variance and a.count == b.count
    assert torch.equal(a.coefficients, b.coefficients) and torch.equal(a.singular_values, b.singular_values)
    assert a.directions.keys() == b.directions.keys()
    assert all(torch.equal(a.directions[label], b.directions[label]) for label in a.directions)
    beta = sample(a, [3])[0]
    for path, layer in a.lora(beta).items():
        other = b.lora(beta)[path]
        torch.testing.assert_close((layer.down, layer.up), (other.down, other.up), rtol=1e-5, atol=1e-6)
        assert layer.alpha == other.alpha


def test_a_space_in_the_old_form(space, tmp_path):
    new = WeightSpace.load(space.save(tmp_path / "new.safetensors"))
    old = load_space(old_space(tmp_path / "old.safetensors", space))
    same(old, new)
    assert old.manifest == new.manifest and torch.equal(old.mean, new.mean) and torch.equal(old.scale, new.scale)
    same(load_space(old.save(tmp_path / "again.safetensors")), new)


def test_a_delta_space_in_the_old_form(loras, tmp_path):
    space = DeltaSpace.of(loras(8), [f"m{i}" for i in range(8)], 5, info={"base": "tiny"})
    space = with_directions(space, {"odd": torch.arange(5.0)})
    old = load_space(old_delta_space(tmp_path / "old.safetensors", space))
    same(old, load_space(space.save(tmp_path / "new.safetensors")))
    assert torch.equal(old.gram, space.gram)


def test_a_model_in_the_old_form(space, tmp_path):
    model = W2WModel(sample(space, [1, 2]), space.identity, ({"sample": {"seeds": [1, 2]}}, {"edit": {"odd": 1.0}}))
    header = {"space": model.space, "history": json.dumps(list(model.history))}
    path = old_form(tmp_path / "old.safetensors", {"beta": model.coefficients}, "vitrine.w2w.model", header)
    old, new = W2WModel.load(path), W2WModel.load(model.save(tmp_path / "new.safetensors"))
    assert torch.equal(old.coefficients, new.coefficients) and (old.space, old.history) == (new.space, new.history)
    assert old.belongs(space) is old
    with pytest.raises(VitrineError, match="kind"):
        load_space(path)
    later = old_form(tmp_path / "later.safetensors", {"beta": model.coefficients}, "vitrine.w2w.model",
                     header | {"version": "2"})  # fmt: skip
    with pytest.raises(VitrineError, match="version"):
        W2WModel.load(later)


def test_the_shipped_people_load_in_either_form(tmp_path):
    """As they ship, and in the form in which they shipped before they had maps."""
    shipped = load_space(PEOPLE_SPACE)
    assert shipped.count == 520 and {"red hair", "red hair (pairs)"} <= shipped.info["strength_maps"].keys()
    same(load_space(old_space(tmp_path / "old.safetensors", shipped)), shipped)
