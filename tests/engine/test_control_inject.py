"""Control in real diffusers models at tiny size: Eq. 1 by hooks, and the training-free blend on public size inputs."""

import threading

import pytest
import torch
from diffusers import (
    CogView3PlusTransformer2DModel,
    DiTTransformer2DModel,
    HunyuanDiT2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from peft import LoraConfig
from vitrine.engine.control import (
    AddedVector,
    ControlEmbedder,
    ControlSpec,
    GammaConfig,
    GuidanceConfig,
    Injection,
    ReferenceBlend,
    added_delta,
    blend,
    control_width,
    delta_share,
    gamma,
    guide,
    injected,
    sdxl_reference,
)
from vitrine.engine.errors import VitrineError

SMALL = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "norm_num_groups": 4,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
         "layers_per_block": 1, "cross_attention_dim": 8, "attention_head_dim": 2}  # fmt: skip
SDXL = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64}


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, TEXT, POOLED = seeded(2, 4, 8, 8), seeded(2, 5, 16, seed=1), seeded(2, 16, seed=2)
T = torch.tensor([700.0, 200.0])


def unet():
    return UNet2DConditionModel(**SMALL), lambda m, x, t: m(x, t, TEXT[..., :8])[0]


def dit():
    net = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4,
                                num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=4)  # fmt: skip
    return net, lambda m, x, t: m(x, timestep=t, class_labels=torch.tensor([1, 3])).sample


def pixart():
    net = PixArtTransformer2DModel(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=8,
                                   num_layers=2, cross_attention_dim=24, sample_size=8, patch_size=2,
                                   caption_channels=16, use_additional_conditions=True)  # fmt: skip

    def call(m, x, t, sizes=((512.0, 300.0), (512.0, 300.0))):
        told = {"resolution": torch.tensor(sizes), "aspect_ratio": torch.tensor([[1.0], [1.5]])}
        return m(x, encoder_hidden_states=TEXT, timestep=t, added_cond_kwargs=told).sample

    return net, call


def sd3():
    net = SD3Transformer2DModel(sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
                                num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
                                pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8)  # fmt: skip
    return net, lambda m, x, t: m(x, TEXT, POOLED, t)[0]


MODELS = {"unet": unet, "dit": dit, "pixart": pixart, "sd3": sd3}
TIME = {"unet": "time_embedding", "dit": "transformer_blocks.1.norm1.emb", "pixart": "adaln_single.emb",
        "sd3": "time_text_embed"}  # fmt: skip


def build(name):
    torch.manual_seed(0)
    net, call = MODELS[name]()
    return net.eval().requires_grad_(False), call


def controls(net, zero_init=False, **change):
    spec = ControlSpec()
    torch.manual_seed(7)
    told = spec.reference() | {"flip": [0, 1], "crop_top": 0.3, "height": [400, 900]} | change
    return ControlEmbedder(spec, control_width(net), zero_init).requires_grad_(False), spec.rows(told)


def seen(net, path, run):
    """What the module at ``path`` hands on, other hooks included, and the network's output."""
    kept = []
    handle = net.get_submodule(path).register_forward_hook(lambda m, a, out: kept.append(out.clone()))
    try:
        return run(), kept[-1]
    finally:
        handle.remove()


# --- Eq. 1 in the network -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_c_emb_is_added_to_the_timestep_embedding(name):
    net, call = build(name)
    made, rows = controls(net)
    before, plain = seen(net, TIME[name], lambda: call(net, X, T))
    config = GammaConfig(alpha=2.0)
    with Injection(net, made, rows, config):
        during, told = seen(net, TIME[name], lambda: call(net, X, T))
    high, low = made.terms(rows)
    weight = torch.tensor([gamma(0.7, alpha=2.0), gamma(0.2, alpha=2.0)])[:, None].float()
    assert torch.allclose(told - plain, high + weight * low, atol=1e-6)
    assert float((during - before).abs().max()) > 1e-6
    assert torch.equal(call(net, X, T), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("name", MODELS)
def test_zero_and_dropped_control_leave_the_output(name):
    net, call = build(name)
    before = call(net, X, T)
    made, rows = controls(net, zero_init=True)
    with Injection(net, made, rows, GammaConfig()):
        assert torch.equal(call(net, X, T), before)
    made, rows = controls(net)
    with Injection(net, made, rows, GammaConfig(), drop=torch.tensor([True, False])):
        half = call(net, X, T)
    assert torch.equal(half[0], before[0]) and not torch.equal(half[1], before[1])


def test_alpha_matters_for_size_alone_and_crop_acts_early():
    net, call = build("dit")
    made, rows = controls(net)
    first = torch.full((2,), 999.0)
    late = torch.full((2,), 200.0)

    def run(rows, alpha, t, drop=None):
        with Injection(net, made, rows, GammaConfig(alpha=alpha), drop):
            return call(net, X, t)

    no_low = torch.tensor([[False, True]] * 2)
    assert torch.equal(run(rows, 1.0, late, no_low), run(rows, 8.0, late, no_low))
    assert not torch.equal(run(rows, 1.0, late), run(rows, 8.0, late))
    cropped = controls(net, crop_top=0.9)[1]
    assert float((run(cropped, 8.0, first) - run(rows, 8.0, first)).abs().max()) > 1e-6
    resized = controls(net, height=[100, 5000])[1]
    assert torch.equal(run(resized, 8.0, first), run(rows, 8.0, first))


def test_one_timestep_for_all_rows_may_be_a_plain_number():
    net, call = build("unet")
    made, rows = controls(net)
    with Injection(net, made, rows, GammaConfig()):
        assert torch.equal(call(net, X, 500), call(net, X, torch.tensor([500, 500])))
        assert torch.equal(call(net, X, torch.tensor(500)), call(net, X, 500))


def test_hooks_go_after_an_error_and_rows_must_match():
    net, call = build("unet")
    made, rows = controls(net)
    before = call(net, X, T)
    with pytest.raises(VitrineError, match="2 rows"), Injection(net, made, rows, GammaConfig()):
        net(X[:1].expand(3, -1, -1, -1), 5, TEXT[:1, :, :8].expand(3, -1, -1))
    block = Injection(net, made, rows[:1], GammaConfig())
    with block, pytest.raises(VitrineError, match="open already"):
        block.__enter__()
    assert torch.equal(call(net, X, T), before)
    with pytest.raises(VitrineError, match="width"):
        Injection(net, ControlEmbedder(ControlSpec(), 5), rows, GammaConfig())
    with pytest.raises(VitrineError, match="vector"):
        AddedVector(net, torch.zeros(2, 5))
    with pytest.raises(VitrineError, match="accepted"):
        control_width(torch.nn.Linear(2, 2))


def test_threads_keep_their_own_clock():
    net, call = build("unet")
    made, rows = controls(net)
    times = [torch.full((2,), float(t)) for t in (900, 600, 300, 0)]
    found = {}
    with Injection(net, made, rows, GammaConfig()):
        alone = [call(net, X, t) for t in times]
        gate = threading.Barrier(4)

        def wait(module, args):
            gate.wait(30)  # all clocks are set before any embedding is made

        handle = net.time_embedding.register_forward_pre_hook(wait)

        def task(i):
            found[i] = call(net, X, times[i])

        work = [threading.Thread(target=task, args=(i,)) for i in range(4)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        handle.remove()
    assert all(torch.equal(found[i], alone[i]) for i in range(4))


@pytest.mark.parametrize("name", MODELS)
def test_injection_holds_under_gradient_checkpointing(name):
    net, call = build(name)
    made, rows = controls(net)
    made.requires_grad_(True)
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            net.enable_gradient_checkpointing()
        made.zero_grad()
        with Injection(net, made, rows, GammaConfig()):  # open until the backward pass is done
            loss = call(net, X, T).square().mean()
            # On a GPU the blocks are recomputed in a thread of autograd's own.
            backward = threading.Thread(target=loss.backward)
            backward.start()
            backward.join()
        grads.append([p.grad.clone() for p in made.parameters()])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*grads, strict=True))
    assert any(bool((g != 0).any()) for g in grads[0])
    network = injected(net, lambda x, t, s: call(net, x, t))
    if name == "dit":
        with pytest.raises(VitrineError, match="checkpointing"):
            network(X, T, TEXT, torch.zeros(2, control_width(net)))
    else:
        assert network(X, T, TEXT, torch.zeros(2, control_width(net))).shape[0] == 2


def test_the_skip_rule_holds_in_a_network():
    net, call = build("dit")
    made, rows = controls(net)
    start = torch.full((2,), 1000.0)  # gamma = 0

    def predict(control, semantics):
        drop = torch.tensor([[True, not control]] * 2)  # the high-level control is null
        classes = torch.tensor([1, 3]) if semantics else torch.tensor([4, 4])
        with Injection(net, made, rows, GammaConfig(), drop):
            return net(X, timestep=start, class_labels=classes).sample

    config = GuidanceConfig(3.0, 1.375)
    slow, quick = guide(predict, config, 0.0), guide(predict, config, 0.0, high_is_null=True)
    assert (slow.evaluations, quick.evaluations) == (3, 2) and torch.equal(slow.prediction, quick.prediction)


# --- checks 12 and 13: the blend ------------------------------------------------------------------------------------
IDS = torch.tensor([[300.0, 200, 0, 64, 1024, 768], [2000, 1500, 32, 0, 1024, 768]])
REFERENCE = torch.cat([IDS[:, 4:], IDS[:, 2:]], 1)


def sdxl(lora=False):
    torch.manual_seed(0)
    net = UNet2DConditionModel(**SMALL, **SDXL).eval()
    if lora:
        places = ["add_embedding.linear_1", "add_embedding.linear_2"]
        net.add_adapter(LoraConfig(r=2, target_modules=places, init_lora_weights=False))
    return net.requires_grad_(False)


def told(net, ids, t=T, x=X, text=TEXT[..., :8], pooled=POOLED):
    return net(x, t, text, added_cond_kwargs={"text_embeds": pooled, "time_ids": ids}).sample


def vector(net, ids):
    return torch.cat([POOLED, net.add_time_proj(ids.flatten()).reshape(2, -1)], 1)


@pytest.mark.parametrize("lora", [False, True])
def test_the_blend_has_the_model_at_both_ends(lora):
    net = sdxl(lora)
    plain, neutral = told(net, IDS), told(net, REFERENCE)
    assert not torch.equal(plain, neutral)
    with ReferenceBlend(net, GammaConfig("constant")):
        assert torch.equal(told(net, IDS), plain)
    with ReferenceBlend(net, GammaConfig("step", step_at=0.0)):
        assert torch.equal(told(net, IDS), neutral)
    with ReferenceBlend(net, GammaConfig()):
        assert torch.equal(told(net, IDS, torch.zeros(2)), told(net, IDS, torch.zeros(2)))
        early = told(net, IDS, torch.full((2,), 1000.0))
    assert torch.equal(early, told(net, REFERENCE, torch.full((2,), 1000.0)))
    assert torch.equal(told(net, IDS), plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("lora", [False, True])
def test_the_blend_is_the_rule_by_hand_with_a_weight_for_each_row(lora):
    net = sdxl(lora)
    full, ref = net.add_embedding(vector(net, IDS)), net.add_embedding(vector(net, REFERENCE))
    weight = torch.tensor([gamma(0.7), gamma(0.2)])[:, None].float()
    by_hand = ref + weight * (full - ref)
    with ReferenceBlend(net, GammaConfig()):
        found, added = seen(net, "add_embedding", lambda: told(net, IDS))
        swapped = told(net, IDS.flip(0), T.flip(0), X.flip(0), TEXT.flip(0)[..., :8], POOLED.flip(0))
    assert torch.allclose(added, by_hand, atol=1e-6)
    handle = net.add_embedding.register_forward_hook(lambda m, a, out: by_hand)
    oracle = told(net, IDS)
    handle.remove()
    assert torch.allclose(found, oracle, atol=1e-6)
    assert torch.allclose(swapped.flip(0), found, atol=1e-6)
    at_input = net.add_embedding(vector(net, REFERENCE) + weight * (vector(net, IDS) - vector(net, REFERENCE)))
    assert float((at_input - by_hand).abs().max()) > 1e-3  # why it is not done there


def test_the_added_vector_is_linear_in_gamma():
    net = sdxl()
    found = {}
    for share in (0.0, 0.25, 0.5, 1.0):
        t = torch.full((2,), 1000 * (1 - share))
        with ReferenceBlend(net, GammaConfig("linear")):
            found[share] = seen(net, "add_embedding", lambda t=t: told(net, IDS, t))[1]
    assert torch.allclose(found[0.25], 0.75 * found[0.0] + 0.25 * found[1.0], atol=1e-6)
    assert torch.allclose(found[0.5], (found[0.0] + found[1.0]) / 2, atol=1e-6)


def test_alpha_changes_nothing_at_the_reference_and_crop_acts_at_any_alpha():
    net = sdxl()
    plain = told(net, REFERENCE)
    for alpha in (1.0, 8.0):
        with ReferenceBlend(net, GammaConfig(alpha=alpha)):
            assert torch.equal(told(net, REFERENCE), plain)
    first, cropped = torch.full((2,), 1000.0), IDS.clone()
    cropped[:, 2:4] += 400
    larger = IDS.clone()
    larger[:, :2] *= 3
    with ReferenceBlend(net, GammaConfig(alpha=8.0)):
        start = told(net, IDS, first)
        assert float((told(net, cropped, first) - start).abs().max()) > 1e-6
        assert torch.equal(told(net, larger, first), start)


def test_sizes_zeros_and_refusals():
    net = sdxl()
    sized = IDS.clone()
    sized[:, :2] = torch.tensor([640.0, 512.0])
    off = GammaConfig("step", step_at=0.0)
    with ReferenceBlend(net, off, (640, 512)):
        assert torch.equal(told(net, IDS), told(net, sized))
    with ReferenceBlend(net, off, "zeros"):
        added = seen(net, "add_embedding", lambda: told(net, IDS))[1]
    y = vector(net, IDS)
    y[:, 16:32] = 0
    assert torch.equal(added, net.add_embedding(y))
    with pytest.raises(VitrineError, match="text_time"):
        ReferenceBlend(build("unet")[0], off)
    with pytest.raises(VitrineError, match="nothing to weight"):
        ReferenceBlend(build("sd3")[0], off)
    for bad in ("size", (0, 5)):
        with pytest.raises(VitrineError, match="reference"):
            ReferenceBlend(net, off, bad)


def test_the_delta_gives_the_same_vector_beside_the_models_own():
    net = sdxl()
    y, weight = vector(net, IDS), torch.tensor([0.3, 1.0], dtype=torch.float64)
    neutral = sdxl_reference(y, "target", channels=8)
    assert torch.equal(neutral, vector(net, REFERENCE))
    delta = added_delta(net.add_embedding, y, neutral)
    share = delta_share(delta, weight)
    assert bool((share[1] == 0).all())
    mixed = blend(net.add_embedding(y), net.add_embedding(neutral), weight)
    assert torch.allclose(net.add_embedding(y) + share, mixed, atol=1e-6)
    assert torch.equal(mixed[1], net.add_embedding(y)[1])
    assert bool((added_delta(net.add_embedding, neutral, neutral) == 0).all())
    # The sinusoid used where no model gives its own is the models' own.
    plain = sdxl_reference(seeded(2, 16 + 6 * 8), (640, 512), channels=8)
    assert torch.allclose(plain[0, 16:32], net.add_time_proj(torch.tensor([640.0, 512.0])).flatten(), atol=1e-5)


def test_pixart_weighs_resolution_and_leaves_aspect():
    net, call = build("pixart")
    plain = call(net, X, T)
    with ReferenceBlend(net, GammaConfig("constant")):
        assert torch.equal(call(net, X, T), plain)
    neutral = call(net, X, T, ((64.0, 64.0), (64.0, 64.0)))
    with ReferenceBlend(net, GammaConfig("step", step_at=0.0)):
        assert torch.equal(call(net, X, T), neutral)
    emb, path = net.adaln_single.emb, "adaln_single.emb"
    with ReferenceBlend(net, GammaConfig()):
        added = seen(net, path, lambda: call(net, X, T))[1]
    ends = [seen(net, path, lambda s=s: call(net, X, T, (s, s)))[1] for s in ((64.0, 64.0), (512.0, 300.0))]
    weight = torch.tensor([gamma(0.7), gamma(0.2)])[:, None].float()
    assert torch.allclose(added, ends[0] + weight * (ends[1] - ends[0]), atol=1e-6)
    assert not torch.equal(plain, neutral) and emb.use_additional_conditions
    assert torch.equal(call(net, X, T), plain)


def cogview():
    net = CogView3PlusTransformer2DModel(patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8,
                                         num_attention_heads=2, out_channels=4, text_embed_dim=16, time_embed_dim=8,
                                         condition_dim=8, pos_embed_max_size=8, sample_size=8)  # fmt: skip

    def call(m, ids, t):
        return m(X, TEXT, t, original_size=ids[:, :2], target_size=ids[:, 4:], crop_coords=ids[:, 2:4]).sample

    return net, call


def hunyuan():
    net = HunyuanDiT2DModel(sample_size=8, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8,
                            num_attention_heads=2, cross_attention_dim=8, cross_attention_dim_t5=8,
                            pooled_projection_dim=4, hidden_size=16, text_len=5, text_len_t5=5,
                            activation_fn="gelu-approximate")  # fmt: skip

    def call(m, ids, t):
        text, mask = TEXT[..., :8], torch.ones(2, 5)
        meta = torch.cat([ids[:, :2], ids[:, 4:], ids[:, 2:4]], 1)
        rope = (torch.ones(16, 8), torch.zeros(16, 8))
        return m(X, t, text, mask, text, mask, meta, torch.zeros(2, dtype=torch.long), rope).sample

    return net, call


@pytest.mark.parametrize("make", [cogview, hunyuan])
def test_cogview_and_hunyuan_have_the_model_at_both_ends(make):
    torch.manual_seed(0)
    net, call = make()
    net.eval().requires_grad_(False)
    for p in net.parameters():  # some of their layers start at zero, which would hide the condition
        p.copy_(seeded(*p.shape, seed=3) * 0.2)
    plain, neutral = call(net, IDS, T), call(net, REFERENCE, T)
    assert not torch.equal(plain, neutral)
    with ReferenceBlend(net, GammaConfig("constant")):
        assert torch.equal(call(net, IDS, T), plain)
    with ReferenceBlend(net, GammaConfig("step", step_at=0.0)):
        assert torch.equal(call(net, IDS, T), neutral)
    with ReferenceBlend(net, GammaConfig()):
        mixed = call(net, IDS, T)
    assert not torch.equal(mixed, plain) and not torch.equal(mixed, neutral)
    assert torch.equal(call(net, IDS, T), plain)


def test_what_is_told_is_embedded_once_a_run_and_anew_in_training(monkeypatch):
    net, call = unet()
    made, spec = ControlEmbedder(ControlSpec(), control_width(net)), ControlSpec()
    counted, terms = [], ControlEmbedder.terms

    def counting(self, *args):
        counted.append(torch.is_grad_enabled())
        return terms(self, *args)

    monkeypatch.setattr(ControlEmbedder, "terms", counting)
    block = Injection(net, made, spec.rows(spec.reference()), GammaConfig(), torch.tensor([False, True]))
    with torch.no_grad():
        for t in (900.0, 500.0, 100.0):
            with block:
                found = call(net, X, torch.full((2,), t))
            with Injection(net, made, spec.rows(spec.reference()), GammaConfig(), torch.tensor([False, True])):
                assert torch.equal(found, call(net, X, torch.full((2,), t)))
    assert len(counted) == 1 + 3
    with block:
        call(net, X, T).sum().backward()
    assert counted[-1] and made.h[2].weight.grad.abs().sum() > 0
