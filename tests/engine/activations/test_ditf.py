"""DiTF's remedy: block inputs as their block reads them, without massive channels."""

from dataclasses import replace

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from vitrine.engine.activations import ActivationWriter, TapConfig, massive_channels, preset, tap_latents
from vitrine.engine.activations.correspondence import feature_maps, find_correspondence, pck
from vitrine.engine.activations.tap import modulated, without_channels
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.files import read_artefact, save_artefact
from vitrine.engine.network.condition import Condition
from vitrine.engine.network.site import AdaLN, adaln_site
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import load_transformer
from vitrine.engine.tracing.addresses import resolve, sites_of
from vitrine.engine.tracing.hooks import capture
from vitrine.evidence.activations.tapped_pictures import draw_scene
from vitrine_tests import models
from vitrine_tests.engine.massive_channel import with_massive_channel
from vitrine_tests.families import twin

pytestmark = pytest.mark.rounding
DUAL = {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
OLDER = {
    "PixArt": lambda: (models.pixart(), DDIMScheduler(), Condition(torch.randn(2, 7, 24))),
    "SD3": lambda: (models.sd3(), FlowMatchEulerDiscreteScheduler(), _pooled()),
    "SD3.5": lambda: (models.sd3(**DUAL), FlowMatchEulerDiscreteScheduler(), _pooled()),
    "Flux": lambda: (models.flux(num_single_layers=2), FlowMatchEulerDiscreteScheduler(), _pooled()),
}


def _pooled():
    return Condition(torch.randn(2, 7, 24), torch.randn(2, 20))


def network_of(name):
    """(denoiser, latents, condition) with weights, norms and tables away from what they are built with."""
    torch.manual_seed(5)
    if name in OLDER:
        net, scheduler, cond = OLDER[name]()
        latents = torch.randn(2, 4, 8, 12)
    else:
        net, scheduler = twin.network(name), FlowMatchEulerDiscreteScheduler()
        latents, _, cond = twin.inputs(name)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return Denoiser.from_diffusers(net, scheduler), latents, cond


@pytest.mark.parametrize("name", [*OLDER, *twin.NAMES])
def test_a_modulated_input_is_what_attention_reads(name, no_hooks_left):
    """f of every block, from its input and adaLN alone, against the tensor that its query projection is given."""
    denoiser, latents, cond = network_of(name)
    no_hooks_left(denoiser.backbone)
    config = TapConfig(("vit-block*-in",), 300, modulate=True)
    noise = torch.randn(1, *latents.shape)
    taps = tap_latents(denoiser, latents, cond, config, noise=noise)
    table = sites_of(denoiser.backbone)
    inputs = [a for a in table if a.endswith("-in")]
    assert list(taps) == inputs and len(inputs) >= 2
    queries = [replace(table[_query(a, table)], address=a, before=True, columns=None, adaln=None) for a in inputs]
    with torch.no_grad(), capture(denoiser.backbone, queries, latent_size=tuple(latents.shape[-2:])) as read:
        denoiser.forward(denoiser.network_input(latents, noise[0], 300), 300, cond)
    for address in inputs:
        largest = float(read[address].tensor.abs().max())
        assert float((taps[address].tensor - read[address].tensor).abs().max()) <= 1e-5 * largest, address


def _query(address, table):
    block = address.removesuffix("-in")
    return f"{block}-q" if f"{block}-q" in table else f"{block}-self-q"


@pytest.mark.parametrize("rms", [False, True])
def test_the_equation(rms):
    """Zero, normalise, modulate, in this order (DiTF's code), written once more."""
    x, shift, scale = torch.randn(2, 6, 3, 4), torch.randn(2, 6), torch.randn(2, 6)
    adaln = AdaLN("", rms=rms)
    ours = modulated(without_channels(x, (1, 4)), torch.stack([shift, 1 + scale], 1), adaln)
    kept = x.permute(0, 2, 3, 1).clone()
    kept[..., [1, 4]] = 0
    norm = torch.nn.functional.rms_norm if rms else torch.nn.functional.layer_norm
    expected = norm(kept, (6,), eps=1e-6) * (1 + scale[:, None, None]) + shift[:, None, None]
    assert torch.allclose(ours.permute(0, 2, 3, 1), expected, atol=1e-5)


def test_seeds_are_averaged_before_the_norm():
    """DiTF modulates the mean over its eight noises, not each of them."""
    denoiser, latents, cond = network_of("Flux")
    place = "vit-block2-in"
    (site,) = resolve(denoiser.backbone, place)
    raw = tap_latents(denoiser, latents, cond, TapConfig((place,), 260, tuple(range(3))))[place].tensor
    ours = tap_latents(denoiser, latents, cond, TapConfig((place,), 260, tuple(range(3)), modulate=True, discard=(3,)))
    where = adaln_site(site)
    with torch.no_grad(), capture(denoiser.backbone, [where]) as read:
        denoiser.forward(latents, 260, cond)
    expected = modulated(without_channels(raw, (3,)), read[where.address].tensor, site.adaln)
    assert torch.allclose(ours[place].tensor, expected, atol=1e-5)


# --- a massive channel ----------------------------------------------------------------------------------------------
CHANNEL, FACTOR, PLACE = 17, 1000.0, "vit-block4-in"


@pytest.fixture(scope="module")
def scene():
    return draw_scene(load_portraits(), range(7_200_000, 7_200_024))


def score(net, scene, **remedy):
    """PCK@0.1 of keypoints between neighbouring portraits, and the taps."""
    denoiser = Denoiser.from_diffusers(net, load_portraits().scheduler)
    taps = tap_latents(denoiser, scene.latents, scene.cond, TapConfig((PLACE,), 50, **remedy))
    features, found, true = feature_maps(taps), [], []
    for i, j in ((i, (i + 1) % len(features)) for i in range(len(features))):
        seen = ~torch.isnan(scene.keypoints[[i, j]]).any(0).any(1)
        found.append(find_correspondence(features[i], features[j], scene.keypoints[i][seen]).points)
        true.append(scene.keypoints[j][seen])
    return pck(found, true, [1.0] * len(features))[0], taps[PLACE].tensor


def test_an_injected_channel_breaks_raw_matching_and_the_remedy_mends_it(scene):
    net = load_transformer()
    bad = with_massive_channel(net, CHANNEL, FACTOR)
    with torch.no_grad():
        outputs = [
            Denoiser.from_diffusers(n, DDIMScheduler()).forward(scene.latents, 50, scene.cond) for n in (net, bad)
        ]
    assert torch.allclose(*outputs, atol=2e-5), "the function is unchanged"
    raw, sane = score(net, scene)
    broken, massive = score(bad, scene)
    assert massive_channels(sane) == () and massive_channels(massive) == (CHANNEL,)
    whole, _ = score(net, scene, modulate=True)
    mended, _ = score(bad, scene, modulate=True, discard=massive_channels(massive))
    assert broken < raw - 0.2 and score(bad, scene, modulate=True)[0] < whole - 0.2
    assert abs(mended - whole) <= 0.02 and mended > raw


# --- options --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"addresses": "vit-block0-q", "modulate": True}, "block inputs"),
        ({"addresses": "vit-block0-in", "discard": (99,)}, "channels 0 .. 31"),
        ({"addresses": "vit-block0-ctx-q", "discard": (1,)}, "layers with a grid"),
    ],
)
def test_places_without_adaln_and_channels_that_are_not_there_are_refused(settings, word):
    denoiser, latents, cond = network_of("Flux")
    with pytest.raises(VitrineError, match=word):
        tap_latents(denoiser, latents, cond, TapConfig(timestep=260, **settings))


def test_the_finder_wants_pictures():
    with pytest.raises(VitrineError, match="have no grid"):
        massive_channels(torch.zeros(1, 5, 8))
    x = torch.ones(2, 40, 4, 4)
    x[:, 3], x[:, 8] = 40, -400
    assert massive_channels(x) == (8, 3) and massive_channels(x, 100) == (8,)


def test_the_preset_is_the_papers():
    config = preset("DiTF-Flux").config()
    assert config == TapConfig(("vit-block28-in",), 260, tuple(range(8)), modulate=True, discard=(154, 1446))
    assert TapConfig.from_dict(config.to_dict()) == config


def test_a_folder_that_was_begun_before_these_settings_goes_on(tmp_path):
    denoiser, latents, cond = network_of("Flux")
    config = TapConfig("vit-block0-in", 260)
    with ActivationWriter(tmp_path, config) as writer:
        writer.add("a", tap_latents(denoiser, latents[:1], cond.take(torch.tensor([0])), config))
    (shard,) = tmp_path.glob("shard-*")
    kind, version = "vitrine.activations.shard", 1
    tensors, header = read_artefact(shard, kind, version)
    for name in ("modulate", "discard"):
        header["config"].pop(name)
    save_artefact(shard, tensors, kind, version, header, lambda *_: None)
    (tmp_path / "index.json").unlink()
    assert "a" in ActivationWriter(tmp_path, config)
    with pytest.raises(VitrineError, match="modulate"):
        ActivationWriter(tmp_path, replace(config, modulate=True))
