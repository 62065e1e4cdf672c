"""Fingerprints: one checkpoint in any precision, and no other."""

import copy

import pytest
import torch
from vitrine.engine.families import spelled_layers
from vitrine.engine.jobs.digests import network_digest
from vitrine.engine.nemo import NeuronSet, value_sites
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.fingerprint import fingerprint_of, same_weights, short
from vitrine_tests import models

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def unet():
    return models.unet()


@pytest.mark.parametrize("saved", DTYPES)
@pytest.mark.parametrize("loaded", DTYPES)
def test_a_checkpoint_is_known_in_every_precision(unet, saved, loaded):
    one, other = (copy.deepcopy(unet).to(dtype) for dtype in (saved, loaded))
    neurons = NeuronSet({value_sites(one)[0].address: (1,)}, fingerprint_of(one))
    neurons.check(other, value_sites(other, "all"))


def test_through_fp16_and_then_bfloat16(unet):
    """bf16(fp16(w)) is not bf16(w) for one weight in sixteen or so."""
    twice = copy.deepcopy(unet).half().bfloat16()
    assert same_weights(fingerprint_of(unet), fingerprint_of(twice))


def test_a_fine_tune_is_another_model(unet):
    tuned = copy.deepcopy(unet)
    with torch.no_grad():
        for p in tuned.parameters():
            p.mul_(1 + 0.05 * torch.randn_like(p))
    assert not same_weights(fingerprint_of(unet), fingerprint_of(tuned))
    assert not same_weights(fingerprint_of(unet), fingerprint_of(models.unet(seed=1)))


def test_another_tools_hash_equals_only_itself(unet):
    known = fingerprint_of(unet)
    assert len(short(known)) == 16 and not same_weights("sha256-of-another-tool", known)
    assert same_weights("sha256-of-another-tool", "sha256-of-another-tool")


def test_entries_that_choose_attention_kernels_are_no_weights(unet):
    """ComfyUI keeps ``*.comfy_attention.config``, bytes of JSON, in the state dicts of newer checkpoints."""
    other = copy.deepcopy(unet)
    chosen = torch.tensor(list(b'{"attention": "comfy_kitchen_int8"}'), dtype=torch.uint8)
    for attention in [m for m in other.modules() if hasattr(m, "to_q")]:
        attention.comfy_attention = torch.nn.Module()
        attention.comfy_attention.register_buffer("config", chosen)
    assert sum(k.endswith("comfy_attention.config") for k in other.state_dict()) == 8
    assert fingerprint_of(other) == fingerprint_of(unet) and network_digest(other) == network_digest(unet)
    assert list(sites_of(other)) == list(sites_of(unet))
    assert [names[:2] for names in spelled_layers(other)] == [names[:2] for names in spelled_layers(unet)]
