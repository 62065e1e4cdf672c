"""Adapters of strangers: read as what they are, or refused by name; little memory, no pattern ever run."""

import json

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft.tuners.lora.config import KasaConfig
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import build_space, read_header, read_lora, scan_folder, write_lora
from vitrine_tests.attacks.loras import HUGE, SENSELESS, SETTINGS, WIDE, plain, write
from vitrine_tests.engine.small_loras import Held, deltas, lora
from vitrine_tests.engine.wild import tiny

MOST = 500 * 2**20
"""Bytes of tensors that a small file may take."""


def test_no_file_asks_for_more_than_a_layer(tmp_path):
    for label, tensors in HUGE.items():
        path = write(tmp_path, tensors)
        with Held() as held, pytest.raises(VitrineError, match=path.name):
            read_lora(path)
        assert held.most <= 2**20, label
    for label, tensors in WIDE.items():
        with Held() as held:
            layers = read_lora(write(tmp_path, tensors))
        assert held.most <= 64 * 2**20 and all(torch.isfinite(v.delta()).all() for v in layers.values()), label


def test_what_nobody_can_know_is_refused(tmp_path):
    for label, tensors in SENSELESS.items():
        path = write(tmp_path, tensors)
        with pytest.raises(VitrineError, match=path.name):
            read_lora(path)
        assert scan_folder(tmp_path, fewest=0).good == () or "NaN" in label or "e3" in label, label


def test_settings_of_strangers(tmp_path):
    for label, values in SETTINGS.items():
        for header in (False, True):
            path = write(tmp_path, plain(), values, header)
            with pytest.raises(VitrineError, match="adapter_"):
                read_header(path)
            (tmp_path / "adapter_config.json").unlink(missing_ok=True)
        assert label


VARIANTS = {
    "AdaLoRA": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, lora_alpha=3, target_modules=["to_q"]),
    "AdaLoRA, pruned": peft.AdaLoraConfig(init_r=4, total_step=10, target_modules=["to_q"], rank_pattern=None),
    **{
        str(start): peft.LoraConfig(r=4, lora_alpha=3, target_modules=["to_q"], init_lora_weights=start)
        for start in ("gaussian", "pissa", "pissa_niter_2", "olora", "orthogonal", "mica", False)
    },
    "KaSA": peft.LoraConfig(r=4, target_modules=["to_q"], kasa_config=KasaConfig()),
    "LoHa": peft.LoHaConfig(r=4, alpha=3, target_modules=["to_q"]),
    "LoKr": peft.LoKrConfig(r=4, alpha=3, target_modules=["to_q"]),
}
EXACT = {"AdaLoRA", "AdaLoRA, pruned", "gaussian", "orthogonal", "mica", "False", "LoHa", "LoKr"}


def trained(config):
    """A network with an adapter that has been trained a little, and PEFT's change of each of its base weights."""
    network = tiny()
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    model, random = peft.get_peft_model(network, config), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)
    return model, before


@pytest.mark.parametrize("name", VARIANTS)
def test_pefts_variants_are_exact_or_left_out_by_name(name, tmp_path):
    model, before = trained(VARIANTS[name])
    if "pruned" in name:
        model.peft_config["default"].rank_pattern = {
            f"{path}.lora_E": [bool(i % 3) and not path.startswith("up") for i in range(4)]
            for path, layer in model.base_model.model.named_modules()
            if hasattr(layer, "lora_E")
        }
        for path, layer in model.base_model.model.named_modules():
            if hasattr(layer, "lora_E"):
                layer.lora_E["default"].data *= torch.tensor([[0.0], [1], [1], [0]]) * (not path.startswith("up"))
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    if name not in EXACT:
        with pytest.raises(VitrineError, match=r"adapter_.*(pissa|olora|KaSA|kasa)"):
            read_lora(path)
        return
    layers = read_lora(path)
    changed = 0
    for key, weight in model.merge_and_unload().state_dict().items():
        change = weight - before[key]
        layer = layers.get(key.removesuffix(".weight"))
        if layer is None:
            assert not change.any(), key
            continue
        changed += 1
        assert (layer.delta() - change).norm() <= 1e-5 * change.norm(), key
    assert changed == len(layers) > 0


def tuners():
    """Every tuner of PEFT that takes the names of layers and nothing else."""
    for kind, config in sorted(peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()):
        try:
            yield kind, config(target_modules=["to_q"])
        except Exception:
            continue


@pytest.mark.nightly
def test_every_tuner_of_peft_is_exact_or_left_out_by_name(tmp_path):
    read = set()
    for kind, config in tuners():
        try:
            model, before = trained(config)
            model.save_pretrained(tmp_path / kind)
        except Exception:
            continue  # not for such a network
        try:
            layers = read_lora(tmp_path / kind / "adapter_model.safetensors")
        except VitrineError:
            continue
        read.add(str(kind))
        for key, weight in model.merge_and_unload().state_dict().items():
            change, layer = weight - before[key], layers.get(key.removesuffix(".weight"))
            assert not change.any() if layer is None else (layer.delta() - change).norm() <= 1e-5 * change.norm(), kind
    assert len(read) >= 3


def test_sizes_that_are_known_are_asked_first(tmp_path):
    path = write_lora(tmp_path / "a.safetensors", lora(0))
    sizes = {name: (len(layer.up), layer.down.shape[1]) for name, layer in lora(0).items()}
    assert deltas(read_lora(path, sizes=sizes)).keys() == deltas(lora(0)).keys()
    name = next(iter(sizes))
    with pytest.raises(VitrineError, match=r"a\.safetensors.*out, in"):
        read_lora(path, sizes=sizes | {name: (7, 7)})


KEYS = (
    "lora_down.weight", "lora_up.weight", "alpha", "lora_mid.weight", "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b",
    "lokr_t2", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "diff", "dora_scale", "lora_E",
    "lora_diag",
)  # fmt: skip
NAMES = ("lora_alpha", "r", "alpha_pattern", "rank_pattern", "peft_type", "init_r", "use_rslora")
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(KEYS), st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=7),
    st.dictionaries(st.sampled_from(NAMES), VALUES),
)
def test_any_header_is_read_or_refused(tmp_path, sides, values):
    stem = "lora_unet_mid_block_resnets_0_conv1"
    path = write(tmp_path, {f"{stem}.{role}": torch.ones(side) for role, side in sides.items()}, values)
    try:
        with Held() as held:
            layers = read_lora(path)
    except VitrineError as error:
        assert "adapter_" in str(error)
    else:
        assert held.most <= MOST and all(torch.isfinite(layer.delta()).all() for layer in layers.values())


def test_a_folder_with_attacks_builds_of_the_others(tmp_path):
    for number, tensors in enumerate([*HUGE.values(), *SENSELESS.values()]):
        (tmp_path / f"bad{number}").mkdir()
        write(tmp_path / f"bad{number}", tensors)
    for number in range(3):
        write_lora(tmp_path / f"good{number}.safetensors", lora(number, start=7))
    built = build_space(tmp_path)
    assert [file.name for file in built.folder.good] == ["good0", "good1", "good2"]
    assert json.dumps(built.space.names) == '["good0", "good1", "good2"]'
