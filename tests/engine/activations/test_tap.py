"""The tap on a real tiny UNet: exactness, batching, ensembles, refusals, hooks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from diffusers import FluxTransformer2DModel
from vitrine.engine.activations import PRESETS, TapConfig, gdf_noise, preset, tap_latents, tap_timesteps
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits import build_models
from vitrine.engine.runtime.progress import Interrupted
from vitrine.engine.tracing.addresses import resolve, sites_of
from vitrine_tests import models

PLACES = PRESETS["portraits"].addresses


@pytest.fixture(scope="module")
def model() -> object:
    torch.set_num_threads(1)
    return build_models(seed=1)


@pytest.fixture
def denoiser(model: object, no_hooks_left) -> Iterator[Denoiser]:
    yield Denoiser.from_diffusers(model.pipeline())
    no_hooks_left(model.unet)


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def cond(model: object) -> Condition:
    with torch.no_grad():
        return Condition(text=model.encode(["a smiling face", "a bald man", "a red hat"]))


def tap(denoiser: Denoiser, latents: torch.Tensor, cond: Condition, **settings: object) -> object:
    return tap_latents(denoiser, latents, cond, TapConfig(**{"addresses": PLACES, **settings}))


@torch.no_grad()
def test_equals_a_plain_forward_hook_bit_for_bit(model, denoiser, latents, cond) -> None:
    seen = {}
    unet = model.unet
    places = {
        "up-level0-repeat0-vit-block0-cross-q": unet.up_blocks[0].attentions[0].transformer_blocks[0].attn2.to_q,
        "up-level0-upsampler-out": unet.up_blocks[0].upsamplers[0],
        "mid-repeat0-res-out": unet.mid_block.resnets[0],
    }
    handles = [m.register_forward_hook(lambda m, i, o, a=a: seen.__setitem__(a, o)) for a, m in places.items()]
    noise = torch.stack([gdf_noise(7, (4, 16, 16))] * 3)
    x = denoiser.network_input(latents, noise, 50)
    unet(x, torch.tensor(50), cond.text)
    for handle in handles:
        handle.remove()
    taps = tap(denoiser, latents, cond, addresses=tuple(places), seeds=(7,))
    grids = {a: taps[a].grid for a in places}
    assert grids == {
        "up-level0-repeat0-vit-block0-cross-q": (8, 8),
        "up-level0-upsampler-out": (16, 16),
        "mid-repeat0-res-out": (8, 8),
    }
    for address, expected in seen.items():
        if expected.ndim == 3:
            expected = expected.transpose(1, 2).unflatten(2, grids[address])
        assert torch.equal(taps[address].tensor, expected), address
    assert (model.scheduler.add_noise(latents, noise, torch.tensor([50])) - x).abs().max() < 1e-6


@torch.no_grad()
def test_tap_never_changes_a_bit_of_what_the_module_returned(model, denoiser, latents, cond) -> None:
    seen = []
    block = model.unet.up_blocks[0].resnets[1]
    handle = block.register_forward_hook(lambda m, i, o: seen.append(o))
    taps = tap(denoiser, latents, cond, addresses=("up-level0-repeat1-res-out",))
    handle.remove()
    assert torch.equal(seen[0], taps["up-level0-repeat1-res-out"].tensor)


def test_early_exit_changes_nothing(denoiser, latents, cond) -> None:
    shuffled = tuple(reversed(PLACES[:2]))
    early, full = (tap(denoiser, latents, cond, addresses=shuffled, early_exit=e) for e in (True, False))
    assert list(early) == list(full) == list(PLACES[:2]), "execution order, not the order asked for"
    assert all(torch.equal(early[a].tensor, full[a].tensor) for a in early)


def test_early_exit_stops_early(model, denoiser, latents, cond) -> None:
    ran = []
    handle = model.unet.conv_out.register_forward_hook(lambda *_: ran.append(1))
    tap(denoiser, latents, cond)
    assert not ran
    tap(denoiser, latents, cond, early_exit=False)
    handle.remove()
    assert ran


def test_batch_of_three_equals_single_pictures(denoiser, latents, cond) -> None:
    together = tap(denoiser, latents, cond, seeds=(3, 4), batch=16)
    for i in range(3):
        alone = tap(denoiser, latents[i : i + 1], cond.take(torch.tensor([i])), seeds=(3, 4), batch=1)
        for address in PLACES:
            assert (together[address].tensor[i] - alone[address].tensor[0]).abs().max() < 1e-4


def test_streamed_mean_and_variance_equal_stacked(denoiser, latents, cond) -> None:
    seeds = (0, 1, 2, 3, 4)
    streamed = tap(denoiser, latents, cond, seeds=seeds, variance=True, batch=3)  # the same forwards
    single = [tap(denoiser, latents, cond, seeds=(s,)) for s in seeds]
    for address in PLACES:
        stack = torch.stack([s[address].tensor for s in single])
        assert (streamed[address].tensor - stack.mean(0)).abs().max() < 1e-6
        assert torch.allclose(streamed.variance[address], stack.var(0), atol=1e-5, rtol=1e-4)
    assert streamed.info.seeds == seeds and streamed.info.timestep == 50
    assert abs(streamed.info.sigma - 0.22558) < 1e-4


def test_timesteps_are_batched_and_equal_to_one_at_a_time(denoiser, latents, cond) -> None:
    config = TapConfig(PLACES, seeds=(0, 1), batch=5)
    at_once = tap_timesteps(denoiser, latents, cond, config, (10, 500))
    for taps, t in zip(at_once, (10, 500), strict=True):
        alone = tap(denoiser, latents, cond, seeds=(0, 1), timestep=t)
        assert taps.info.timestep == t
        assert all((taps[a].tensor - alone[a].tensor).abs().max() < 1e-4 for a in PLACES)


def test_one_prompt_serves_all_pictures(denoiser, latents, cond) -> None:
    one = cond.take(torch.tensor([0]))
    wide, repeated = tap(denoiser, latents, one), tap(denoiser, latents, cond.take(torch.tensor([0, 0, 0])))
    assert all(torch.equal(wide[a].tensor, repeated[a].tensor) for a in PLACES)


def test_text_tokens_and_other_sizes(denoiser, cond) -> None:
    taps = tap(denoiser, torch.randn(1, 4, 16, 24), cond.take(torch.tensor([0])), addresses=("up-level*-cross-[qk]",))
    assert taps["up-level0-repeat0-vit-block0-cross-q"].grid == (8, 12)
    key = taps["up-level0-repeat0-vit-block0-cross-k"]
    assert key.grid is None and key.tensor.shape[:2] == (1, 24)


def test_clean_mode_feeds_the_latent_itself(model, denoiser, latents, cond) -> None:
    seen = []
    handle = model.unet.conv_in.register_forward_pre_hook(lambda m, i: seen.append(i[0].clone()))
    tap(denoiser, latents, cond, noise=False)
    handle.remove()
    assert torch.equal(seen[0], latents)


def test_half_precision_storage_and_its_overflow(model, denoiser, latents, cond) -> None:
    assert tap(denoiser, latents, cond, dtype="float16")[PLACES[0]].tensor.dtype == torch.float16
    weight = model.unet.up_blocks[0].attentions[0].transformer_blocks[0].attn2.to_q.weight
    weight.data *= 1e6
    try:
        with pytest.raises(VitrineError, match="float16"):
            tap(denoiser, latents, cond, addresses=PLACES[:1], dtype="float16")
    finally:
        weight.data /= 1e6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timestep": 1000}, "timestep"),
        ({"timestep": 10**9}, "timestep"),
        ({"addresses": ("up-level0-repeat0-vit-block0-cros-q",)}, "up-level0-repeat0-vit-block0-cross-q"),
        ({"addresses": ("nowhere-*",)}, "nowhere"),
    ],
)
def test_refusals_come_before_any_forward(model, denoiser, latents, cond, settings: dict, message: str) -> None:
    ran = []
    handle = model.unet.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(VitrineError, match=message):
            tap(denoiser, latents, cond, **settings)
        for bad in (latents[0], latents.long(), latents * float("nan"), latents[:0]):
            with pytest.raises(VitrineError, match="latents"):
                tap(denoiser, bad, cond)
        with pytest.raises(VitrineError, match="condition"):
            tap(denoiser, latents, cond.take(torch.tensor([0, 1])))
        with pytest.raises(VitrineError, match="noise"):
            tap_latents(denoiser, latents, cond, TapConfig(PLACES), noise=latents)
    finally:
        handle.remove()
    assert not ran


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt, RuntimeError])
def test_an_interrupted_tap_leaves_no_hooks(
    model, denoiser, latents, cond, error: type[BaseException], no_hooks_left
) -> None:
    def stop(step: int, total: int, preview: object = None) -> None:
        raise error

    with pytest.raises(error):
        tap_latents(denoiser, latents, cond, TapConfig(PLACES, batch=1), stop)
    no_hooks_left(model.unet)


def test_presets_resolve_and_carry_their_numbers(model) -> None:
    for name in ("portraits", "portraits-legacy"):
        assert {s.address for s in resolve(model.unet, list(PRESETS[name].addresses))} == set(PRESETS[name].addresses)
    assert preset("ours-V1.5").numbers["spair"] == (77.78, 69.83)
    assert preset("DIFT-semantic").config().seeds == tuple(range(8)) and preset("DHF").config(seeds=(1,)).seeds == (1,)
    with pytest.raises(VitrineError, match="Ours-v1.5"):
        preset("ours-v15")


def test_presets_fit_the_real_architectures() -> None:
    """gdf.md section 7, check 8: channels of each selection on the real configs, without weights."""
    sd15 = models.outline(**models.SD15)
    sdxl = models.outline(**models.SDXL)
    networks = {"SD": sd15, "Cl": sd15, "SDXL": sdxl, "Playground v2": sdxl, "portraits": build_models().unet}
    with torch.device("meta"):
        networks["Flux.1-dev"] = FluxTransformer2DModel(guidance_embeds=True)
    for item in PRESETS.values():
        unet = networks.get(item.model) or networks[item.model[:2]]
        known = sites_of(unet)
        assert set(item.addresses) <= set(known), item.name
        assert sum(_width(unet, known[a].path) for a in item.addresses) == item.channels, item.name


def _width(unet: torch.nn.Module, path: str) -> int:
    module = unet.get_submodule(path)
    for owner, name in ((module, "out_features"), (module, "out_channels"), (module, "channels")):
        if hasattr(owner, name):
            return int(getattr(owner, name))
    norm = getattr(module, "norm1", module)  # of a basic transformer block, or a block's input
    return int(norm.normalized_shape[0])


def test_part_agreement_of_perfect_and_of_useless_features() -> None:
    from vitrine.evidence.activations.measures import part_agreement

    parts = torch.randint(0, 4, (3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    perfect = torch.nn.functional.one_hot(parts.long()).movedim(-1, 1).float()
    assert part_agreement(perfect, parts) == 1.0
    assert part_agreement(torch.randn(3, 8, 16, 16), parts) < 0.5


def test_the_demo_section_writes_itself(model, monkeypatch) -> None:
    """Pictures of every layer, and in its table what knows nothing of faces, beside the filter's choice."""
    from vitrine.engine.io.html_page import Report
    from vitrine.evidence.activations import page as report

    monkeypatch.setattr(report, "MEASURED", 4)
    monkeypatch.setattr(report, "_filter", lambda *args: list(report.SITES)[:2])
    page = Report("t")
    report.section(page, model=model)
    text = page.to_html()
    assert text.count("<img") == 4 * (1 + len(report.SITES)) and "copied coordinates" in text and "raw pixels" in text
    assert text.count("<td>kept</td>") == 2 and text.count("<td>dropped</td>") == len(report.SITES) - 2


def test_maps_are_averaged_over_seeds_and_sum_to_one(denoiser, latents, cond) -> None:
    taps = tap(denoiser, latents, cond, addresses=("up-level0-repeat0-vit-block0-cross-map",), seeds=(0, 1))
    found = taps["up-level0-repeat0-vit-block0-cross-map"]
    assert found.grid is None and found.tensor.shape == (3, 4, 64, 24)
    assert (found.tensor.sum(-1) - 1).abs().max() < 1e-5


def test_an_offloaded_network_taps_the_same(model, latents, cond) -> None:
    """accelerate's offload hooks wrap forwards; an early exit must leave them in order for the next call."""
    import copy

    from accelerate import cpu_offload

    unet = copy.deepcopy(model.unet)
    plain = tap(Denoiser.from_diffusers(unet, model.scheduler), latents, cond)
    cpu_offload(unet, execution_device="cpu")
    offloaded = Denoiser.from_diffusers(unet, model.scheduler)
    assert next(unet.parameters()).is_meta
    for _ in range(2):
        again = tap(offloaded, latents, cond)
        assert all(torch.equal(plain[a].tensor, again[a].tensor) for a in PLACES)
    assert next(unet.parameters()).is_meta


def test_tapping_twice_gives_the_same_and_leaves_the_output_alone(model, denoiser, latents, cond) -> None:
    with torch.no_grad():
        before = model.unet(latents, 50, cond.text).sample
        first, second = tap(denoiser, latents, cond), tap(denoiser, latents, cond)
        after = model.unet(latents, 50, cond.text).sample
    assert torch.equal(before, after) and all(torch.equal(first[a].tensor, second[a].tensor) for a in PLACES)
