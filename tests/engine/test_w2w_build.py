"""LoRA files of every spelling, bad files, the gauge test, both modes of a space, exports into diffusers and PEFT."""

import json

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.models import build_models
from vitrine.engine.w2w import (
    BuildConfig,
    DeltaSpace,
    LoraLayer,
    Manifest,
    WeightSpace,
    build_space,
    gauge_test,
    load_space,
    read_header,
    read_lora,
    scan_folder,
    write_lora,
)
from vitrine.engine.w2w.delta import Stack, gram, refactor
from vitrine.engine.w2w.export import diffusers_names, kohya

SHAPES = {"down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (32, 32),
          "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_v": (32, 64),
          "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0": (96, 96)}  # fmt: skip


def lora(seed, rank=1, alpha=27.0, shapes=SHAPES, start=None, strength=0.05):
    """A LoRA whose A begins at seed ``start`` and moves a little with its own seed."""
    first, own = (torch.Generator().manual_seed(s) for s in (start if start is not None else seed + 1000, seed))
    out = {}
    for path, (height, width) in shapes.items():
        a = torch.rand(rank, width, generator=first) * 2 - 1
        moved = a / width**0.5 + torch.randn(rank, width, generator=own) * 0.2 * strength
        out[path] = LoraLayer(moved, torch.randn(height, rank, generator=own) * strength, alpha)
    return out


def deltas(found):
    return {path: layer.delta() for path, layer in found.items()}


def same(a, b, atol=1e-6):
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=atol) for k in a)


# --- spellings ----------------------------------------------------------------------------------------------------
LDM = {"down_blocks.0.attentions.0": "input_blocks.1.1", "mid_block.attentions.0": "middle_block.1"}


def ldm(path):
    for ours, theirs in LDM.items():
        path = path.replace(ours, theirs)
    return path


def spelled(dialect, x):
    out = {}
    for path, v in x.items():
        if dialect == "kohya":
            stem, names = "lora_unet_" + path.replace(".", "_"), ("lora_down.weight", "lora_up.weight")
        elif dialect == "kohya ldm":
            stem, names = "lora_unet_" + ldm(path).replace(".", "_"), ("lora_down.weight", "lora_up.weight")
        elif dialect == "ComfyUI":
            stem, names = "diffusion_model." + ldm(path), ("lora_A.weight", "lora_B.weight")
        elif dialect == "diffusers old":
            head, tail = path.replace(".to_out.0", ".to_out").rsplit(".", 1)
            stem, names = f"unet.{head}.processor.{tail}_lora", ("down.weight", "up.weight")
        elif dialect == "w2w":
            stem, names = "base_model.model." + path, ("lora_A.identity1.weight", "lora_B.identity1.weight")
        elif dialect == "PEFT":
            stem, names = "base_model.model." + path, ("lora_A.weight", "lora_B.weight")
        elif dialect == "PEFT default":
            stem, names = "base_model.model." + path, ("lora_A.default.weight", "lora_B.default.weight")
        else:
            stem, names = "unet." + path, ("lora.down.weight", "lora.up.weight")
        out[f"{stem}.{names[0]}"], out[f"{stem}.{names[1]}"] = v.down, v.up
        if dialect in ("kohya", "kohya ldm", "ComfyUI", "diffusers", "diffusers old"):
            out[f"{stem}.alpha"] = torch.tensor(v.alpha)
    return out


DIALECTS = ["kohya", "kohya ldm", "ComfyUI", "diffusers old", "diffusers", "PEFT", "PEFT default", "w2w"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_spelling_reads_as_the_same_lora(tmp_path, dialect):
    wanted = lora(1, rank=2)
    folder = tmp_path / "someone"
    folder.mkdir()
    path = folder / ("adapter_model.safetensors" if dialect[:2] in ("PE", "w2") else "someone.safetensors")
    if path.stem == "adapter_model":
        (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 27.0}))
    save_file(spelled(dialect, wanted), path)
    assert read_header(path).name == "someone" and read_header(path).dialect.split()[0] == dialect.split()[0]
    found = read_lora(path)
    assert list(found) == sorted(wanted) and same(deltas(found), deltas(wanted), 0)


def test_names_come_from_real_models():
    """Every attention projection of an SD1.5-shaped UNet, through kohya and ldm names and back."""
    from vitrine.engine.w2w.names import parse

    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768)
    linears = [n for n, m in unet.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    for name in linears:
        assert parse(f"lora_unet_{name.replace('.', '_')}.lora_down.weight").path == name
    ldm_names = {"input_blocks.4.1": "down_blocks.1.attentions.0", "input_blocks.8.1": "down_blocks.2.attentions.1",
                 "output_blocks.3.1": "up_blocks.1.attentions.0", "output_blocks.11.1": "up_blocks.3.attentions.2",
                 "output_blocks.7.0.in_layers.2": "up_blocks.2.resnets.1.conv1", "input_blocks.3.0.op":
                 "down_blocks.0.downsamplers.0.conv", "output_blocks.5.2.conv": "up_blocks.1.upsamplers.0.conv",
                 "middle_block.2.emb_layers.1": "mid_block.resnets.1.time_emb_proj"}  # fmt: skip
    for theirs, ours in ldm_names.items():
        assert parse(f"diffusion_model.{theirs}.lora_up.weight").path.rstrip(".") == ours
        assert parse(f"lora_unet_{theirs.replace('.', '_')}.lora_up.weight").path.rstrip(".") == ours


def test_the_published_order_of_numbers():
    """w2w.md 1.2: 64 layers of SD1.5, 99,648 numbers, and where its blocks begin."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768)
    found = {
        name: LoraLayer(torch.empty(1, m.in_features), torch.empty(m.out_features, 1), 27.0)
        for name, m in unet.named_modules()
        if name.endswith((".to_q", ".to_v"))
    }
    manifest = Manifest.of(found)
    assert (len(manifest), manifest.size) == (64, 99_648)
    begins = {}
    for layer in manifest:
        begins.setdefault(layer.path.split(".attentions")[0], layer.offset)
    assert begins == {"down_blocks.0": 0, "down_blocks.1": 6016, "down_blocks.2": 16_512, "mid_block": 35_968,
                      "up_blocks.1": 45_696, "up_blocks.2": 74_880, "up_blocks.3": 90_624}  # fmt: skip


def test_forty_peft_adapters_read_bit_for_bit(tmp_path):
    """Against PEFT's own writer: a matrix of rows in the order of names, columns in the order of sorted keys."""
    from peft.utils import set_peft_model_state_dict

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=24, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    unet.add_adapter(LoraConfig(r=1, lora_alpha=27, target_modules=["to_q", "to_v"]))
    rows = []
    for i in range(4):
        state = {k: torch.randn_like(v) * 0.1 for k, v in get_peft_model_state_dict(unet).items()}
        set_peft_model_state_dict(unet, state)
        folder = tmp_path / f"id{i}"
        folder.mkdir()
        save_file({f"base_model.model.{k}": v for k, v in state.items()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 27}))
        rows.append(torch.cat([state[k].reshape(-1) for k in sorted(state)]))
    report = scan_folder(tmp_path)
    read = [read_lora(f) for f in report.good]
    manifest = Manifest.of(read[0])
    assert torch.equal(torch.stack([manifest.flatten(x) for x in read]), torch.stack(rows))
    assert all(layer.alpha == 27 for layer in manifest)


# --- bad files ----------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path):
    for i in range(6):
        write_lora(tmp_path / f"good{i}.safetensors", lora(i, start=7))
    return tmp_path


def test_bad_files_are_named_with_a_remedy_and_the_rest_is_used(folder):
    wide = {p: (h, w * 2) for p, (h, w) in SHAPES.items()}
    write_lora(folder / "other_base.safetensors", lora(1, shapes=wide))
    write_lora(folder / "flux.safetensors", lora(1, shapes={"double_blocks.0.img_attn.qkv": (48, 16)}))
    whole = (folder / "good0.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:-40])
    (folder / "noise.safetensors").write_bytes(b"\x00" * 100)
    spoilt = lora(3, start=7)
    next(iter(spoilt.values())).up[0, 0] = float("nan")
    write_lora(folder / "nan.safetensors", spoilt)
    save_file({"lora_unet_x.hada_w1_a": torch.ones(2, 2)}, folder / "loha.safetensors")
    half = kohya(lora(1))
    half.pop(next(k for k in half if "up" in k))
    save_file(half, folder / "half.safetensors")
    torch.save({"a": 1}, folder / "pickle.pt")
    text = {"lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(1, 4)}
    save_file(text, folder / "text.safetensors")
    built = build_space(folder)
    assert built.space.count == 6 and len(built.space.names) == 6
    problems = {b.name.split(".")[0]: b.problem for b in built.folder.bad}
    wanted = {"other_base": "another base", "flux": "another base", "cut": "download it again", "nan": "NaN",
              "noise": "download it again", "loha": "LoHa", "half": "two factors", "pickle": "convert it once",
              "text": "without UNet layers"}  # fmt: skip
    assert problems.keys() == wanted.keys()
    for name, word in wanted.items():
        assert word in problems[name], name
        assert f"left out {name}" in built.text()


def test_report_says_what_was_found(tmp_path):
    write_lora(tmp_path / "a.safetensors", lora(1, rank=2))
    write_lora(tmp_path / "b.safetensors", lora(2, rank=4, alpha=4.0), "diffusers")
    missing = dict(list(lora(3, rank=2).items())[:2])
    write_lora(tmp_path / "c.safetensors", missing)
    built = build_space(tmp_path)
    text = built.text()
    for word in ("3 LoRAs", "2 kohya", "1 diffusers", "3 layers", "ranks 2, 4", "alphas 27", "lack some", "no alpha",
                 "mode delta: b has rank 4, a rank 2"):  # fmt: skip
        assert word in text, word
    with pytest.raises(VitrineError, match="use delta or auto"):
        build_space(tmp_path, BuildConfig("factors"))


def test_too_few_files(tmp_path):
    write_lora(tmp_path / "a.safetensors", lora(1))
    with pytest.raises(VitrineError, match="two or more"):
        build_space(tmp_path)
    with pytest.raises(VitrineError, match="existing folder"):
        build_space(tmp_path / "none")


# --- gauge --------------------------------------------------------------------------------------------------------
def twisted(x, seed, how):
    """The same LoRA in another gauge, for half of the models."""
    if seed % 2:
        return x
    factor = -1.0 if how == "sign" else 30.0
    return {p: LoraLayer(v.down * factor, v.up / factor, v.alpha) for p, v in x.items()}


def test_gauge():
    shared = [lora(i, start=7) for i in range(20)]
    assert gauge_test(shared).shared and gauge_test(shared).cosine > 0.9
    apart = gauge_test([lora(i) for i in range(20)])
    assert not apart.shared and abs(apart.cosine) < 0.15 and "start differently" in apart.reason()
    assert not gauge_test([twisted(x, i, "sign") for i, x in enumerate(shared)]).shared
    scaled = gauge_test([twisted(x, i, "scale") for i, x in enumerate(shared)])
    assert not scaled.shared and "scaled differently" in scaled.reason()


@pytest.mark.parametrize("how", ["sign", "scale"])
def test_delta_mode_does_not_see_the_gauge(how, tmp_path):
    plain = [lora(i, start=7) for i in range(12)]
    other = [twisted(x, i, how) for i, x in enumerate(plain)]
    a, b = DeltaSpace.of(plain), DeltaSpace.of(other)
    assert torch.allclose(a.singular_values, b.singular_values, rtol=1e-6)
    assert torch.allclose(a.coefficients, b.coefficients, atol=1e-6 * float(a.singular_values[0]))
    for i, x in enumerate(other):
        write_lora(tmp_path / f"{i:02}.safetensors", x)
    assert build_space(tmp_path).space.mode == "delta"
    forced = build_space(tmp_path, BuildConfig("factors"))
    assert forced.space.mode == "factors" and "may mean nothing" in forced.text()


def test_auto_takes_factors_for_one_start(folder):
    built = build_space(folder, BuildConfig(base="tiny"))
    assert built.space.mode == "factors" and "comparable" in built.reason and built.space.info["base"] == "tiny"
    for name, row in zip(built.space.names, built.space.coefficients, strict=True):
        wanted = read_lora(folder / f"{name}.safetensors")
        assert same(deltas(built.space.lora(row)), deltas(wanted), 1e-5)
    path = built.space.save(folder.parent / "space.w2w.safetensors")
    assert isinstance(load_space(path), WeightSpace)


# --- delta --------------------------------------------------------------------------------------------------------
MIXED = [lora(i, rank=r, alpha=a) for i, (r, a) in enumerate([(1, 27.0), (2, 1.0), (4, 4.0), (8, 16.0), (2, 2.0)])]


def stacked(loras):
    """(N, all numbers of all products), formed; missing layers are zero."""
    return torch.stack(
        [
            torch.cat([(x[p].delta() if p in x else torch.zeros(s)).reshape(-1) for p, s in SHAPES.items()])
            for x in loras
        ]
    ).double()


@pytest.mark.parametrize("rows", [3, 2048])
def test_gram_equals_the_formed_products(rows):
    loras = [*MIXED, dict(list(MIXED[0].items())[:1])]
    explicit = stacked([{p: LoraLayer(v.down.double(), v.up.double(), v.alpha) for p, v in x.items()} for x in loras])
    stacks = {p: Stack.of(p, [{q: LoraLayer(v.down.double(), v.up.double(), v.alpha) for q, v in x.items()}
                              for x in loras]) for p in SHAPES}  # fmt: skip
    found = gram(stacks, rows=rows)
    assert (found - explicit @ explicit.T).norm() / found.norm() < 1e-10


def test_delta_space_equals_scikit_learn_and_reconstructs_every_model():
    from sklearn.decomposition import PCA

    space = DeltaSpace.of(MIXED)
    formed = stacked(MIXED).numpy()
    reference = PCA(len(MIXED) - 1).fit(formed)
    assert torch.allclose(space.singular_values.double(), torch.from_numpy(reference.singular_values_), rtol=1e-5)
    share = torch.from_numpy(reference.explained_variance_ratio_).float()
    assert torch.allclose(space.explained, share, atol=1e-6)
    for x, row in zip(MIXED, space.coefficients, strict=True):
        assert same(deltas(space.lora(row)), deltas(x), 1e-5)
        assert torch.allclose(space.encode_lora(x), row, atol=1e-4)
    middle = deltas(space.lora(torch.zeros(4)))
    mean = torch.cat([middle[p].reshape(-1) for p in SHAPES])
    assert torch.allclose(mean.double(), torch.from_numpy(reference.mean_), atol=1e-6)


def test_delta_file_and_gradient(tmp_path):
    space = DeltaSpace.of(MIXED, [f"m{i}" for i in range(5)], 3)
    again = load_space(space.save(tmp_path / "d.w2w.safetensors"))
    assert isinstance(again, DeltaSpace) and again.identity == space.identity and again.names == space.names
    beta = torch.ones(3, requires_grad=True)
    sum(v.delta().pow(2).sum() for v in again.stacked(beta).values()).backward()
    assert beta.grad.abs().min() > 0
    assert same(deltas(again.first(2).lora(torch.ones(2))), deltas(space.lora(torch.tensor([1.0, 1.0, 0.0]))), 1e-5)


def test_refactor_is_the_best_low_rank_product():
    layer = next(iter(lora(1, rank=8, shapes={"x": (24, 16)}).values()))
    exact = refactor(layer)
    assert exact.rank == 8 and torch.allclose(exact.delta(), layer.delta(), atol=1e-5) and exact.scale == 1
    u, s, v = torch.linalg.svd(layer.delta())
    assert torch.allclose(refactor(layer, 3).delta(), u[:, :3] * s[:3] @ v[:3], atol=1e-5)
    conv = LoraLayer(torch.randn(2, 4, 3, 3), torch.randn(5, 2, 1, 1), 2.0)
    assert refactor(conv).delta().shape == (5, 4, 3, 3)
    assert torch.allclose(refactor(conv).delta(), conv.delta(), atol=1e-5)


# --- large folders ------------------------------------------------------------------------------------------------
def test_a_folder_larger_than_memory_goes_through_a_file(folder, tmp_path_factory):
    spoilt = lora(3, start=7)
    next(iter(spoilt.values())).up[0, 0] = float("inf")
    write_lora(folder / "good2b.safetensors", spoilt)
    small = BuildConfig(memory=2**20)
    big = {p: (800, 800) for p in SHAPES}
    wide = tmp_path_factory.mktemp("wide")
    for i in range(40):
        x = lora(i, shapes=big, start=7)
        if i == 11:
            next(iter(x.values())).down[0, 0] = float("nan")
        write_lora(wide / f"{i:02}.safetensors", x)
    with pytest.raises(VitrineError, match="work folder"):
        build_space(wide, small)
    work = tmp_path_factory.mktemp("work")
    slow = build_space(wide, small, work=work)
    fast = build_space(wide)
    assert torch.allclose(slow.space.singular_values, fast.space.singular_values, rtol=1e-6)
    assert slow.space.count == 39 and "NaN" in slow.text() and "11" not in slow.space.names
    again = build_space(wide, small, work=work)
    assert torch.allclose(again.space.components, fast.space.components, atol=1e-6), "from the work folder alone"
    with pytest.raises(VitrineError, match="another build"):
        (wide / "00.safetensors").unlink()
        build_space(wide, small, work=work)


# --- exports ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def portraits():
    return build_models(0)


def forward(unet):
    gen = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, 4, 16, 16, generator=gen), torch.randn(2, 24, 64, generator=gen)
    with torch.no_grad():
        return unet(x, 300, encoder_hidden_states=text).sample


def merged(unet, x):
    """The plain way: W + (alpha / r) B A written into a copy."""
    import copy

    other = copy.deepcopy(unet)
    with torch.no_grad():
        for path, layer in x.items():
            other.get_submodule(path).weight += layer.delta()
    return forward(other)


@pytest.mark.parametrize("dialect", ["kohya", "diffusers", "peft"])
@pytest.mark.parametrize("ranks", ["one", "mixed"])
def test_exports_do_the_same_everywhere(tmp_path, portraits, dialect, ranks):
    x = lora(1, rank=2, strength=0.3)
    if ranks == "mixed":
        x[next(iter(x))] = lora(2, rank=4, strength=0.3)[next(iter(x))]
    wanted = merged(portraits.unet, x)
    assert (wanted - forward(portraits.unet)).abs().max() > 0.05
    path = write_lora(tmp_path / ("x" if dialect == "peft" else "x.safetensors"), x, dialect)
    assert same(deltas(read_lora(path)), deltas(x), 1e-6), "our own reader"
    pipe: StableDiffusionPipeline = build_models(0).pipeline()
    if dialect == "peft":
        from peft import PeftModel

        found = forward(PeftModel.from_pretrained(pipe.unet, str(tmp_path / "x")).base_model.model)
    else:
        pipe.load_lora_weights(str(path))
        found = forward(pipe.unet)
    assert (found - wanted).abs().max() < 1e-5


def test_write_refuses(tmp_path):
    with pytest.raises(VitrineError, match="kohya"):
        write_lora(tmp_path / "x.safetensors", lora(1), "pickle")
    with pytest.raises(VitrineError, match="no layers"):
        write_lora(tmp_path / "x.safetensors", {})
    assert not list(tmp_path.iterdir()) and diffusers_names(lora(1))
