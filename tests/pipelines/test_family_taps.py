"""Taps, correspondence and segmentation from any pipeline of a known family, made of real classes of tiny size."""

import pytest
import torch
from diffusers import (
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusion3Pipeline,
    WanPipeline,
    ZImagePipeline,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)
from vitrine.engine.activations import TapConfig, tap_latents
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline, SegmentationPipeline
from vitrine.engine.settings.ranking_options import FilterRule, RankingConfig
from vitrine_tests import models
from vitrine_tests.families import flux2
from vitrine_tests.families.twin import network
from vitrine_tests.lanes import nightly_but

FLOW = FlowMatchEulerDiscreteScheduler
VOCABULARY = {w: i for i, w in enumerate(["<pad>", "</s>", "<unk>", "a", "photo", "of", "cat", "horse"])}


def tokenizer(length=8):
    words = Tokenizer(tokenizer_models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=length,
        chat_template="photo of {% for m in messages %}{{ m['content'] }} {% endfor %}",
    )


def qwen3(width, layers=3):
    config = {
        "vocab_size": 8,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 8,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(5)
    return Qwen3Model(Qwen3Config(**config)).eval()


def t5(width, kind=T5EncoderModel, config=T5Config):
    torch.manual_seed(5)
    return kind(config(vocab_size=8, d_model=width, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).eval()


def shifted_vae(**changes):
    """As the VAEs of flow models are; without a shift their pipelines cannot decode. Tiles are of 64 px."""
    return models.vae(shift_factor=0.3, sample_size=64, **changes)


def z_image():
    return ZImagePipeline(FLOW(), shifted_vae(latent_channels=16), qwen3(20), tokenizer(), network("z_image"))


def flux2_vae():
    config = {
        "block_out_channels": (4,) * 4,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "norm_num_groups": 2,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "latent_channels": 32,
        "layers_per_block": 1,
    }
    vae = models.seeded(AutoencoderKLFlux2, config, 1)
    vae.bn.running_mean += 0.3  # as trained: not what a batch norm is built with
    vae.bn.running_var *= 2.0
    return vae


def klein():
    net = flux2.diffusers(guidance=False)
    net = type(net).from_config({**net.config, "joint_attention_dim": 24}).eval()
    return Flux2KleinPipeline(FLOW(), flux2_vae(), qwen3(8, 28), tokenizer(), net)


def wan():
    config = {
        "base_dim": 4,
        "z_dim": 16,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
    }
    vae = models.seeded(AutoencoderKLWan, config, 1)
    return WanPipeline(tokenizer(), t5(20, UMT5EncoderModel, UMT5Config), vae, FLOW(), network("wan"))


def flux():
    clip = models.text_encoder(projection_dim=models.TEXT)
    net = models.flux(pooled_projection_dim=models.TEXT)
    return FluxPipeline(FLOW(), shifted_vae(), clip, tokenizer(16), t5(models.TEXT), tokenizer(), net)


def sd3():
    clips = [models.text_encoder(projected=True) for _ in range(2)]
    net = models.sd3(joint_attention_dim=2 * models.TEXT, pooled_projection_dim=2 * models.POOLED)
    parts = (net, FLOW(), shifted_vae(), clips[0], tokenizer(16), clips[1], tokenizer(16))
    return StableDiffusion3Pipeline(*parts, t5(2 * models.TEXT), tokenizer())


def pixart():
    return PixArtAlphaPipeline(tokenizer(), t5(models.TEXT), models.vae(), models.pixart(), DDIMScheduler())


MAKERS = {make.__name__: make for make in (z_image, klein, wan, flux, sd3, pixart)}


@pytest.fixture(scope="module", params=nightly_but(MAKERS))
def source(request):
    pipe = MAKERS[request.param]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pictures(count=2, side=64):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def by_hand(source, images):
    """Latents as the stock pipeline scales them."""
    pixels, vae = images * 2 - 1, source.vae
    with torch.no_grad():
        if isinstance(vae, (AutoencoderKLQwenImage, AutoencoderKLWan)):
            z = vae.encode(pixels[:, :, None]).latent_dist.mean
            mean, std = (
                torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)
            )
            return ((z - mean) / std)[:, :, 0]
        z = vae.encode(pixels).latent_dist.mean
        if isinstance(vae, AutoencoderKLFlux2):
            z = Flux2KleinPipeline._patchify_latents(z)
            mean, var = (v.view(1, -1, 1, 1) for v in (vae.bn.running_mean, vae.bn.running_var))
            return (z - mean) / torch.sqrt(var + vae.config.batch_norm_eps)
        return (z - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def test_a_tap_is_what_the_stock_pipelines_own_parts_give(source):
    pipe, images = ActivationTapPipeline.from_pipe(source), pictures()
    out = pipe.tap(images, "a photo of a cat", "vit-block1-out", timestep=300, seeds=(0, 1), output_type="pil")
    taps, latents = out.activations["vit-block1-out"], by_hand(source, images)
    assert taps.tensor.shape[0] == 2 and len(out.pictures["vit-block1-out"]) == 2
    factor = 64 // latents.shape[-1]
    assert factor == pipe._adapter.factor and taps.grid == (64 // factor // pipe._adapter.latent.patch,) * 2
    with torch.no_grad():
        cond = pipe._adapter.condition(["a photo of a cat"], (64, 64))
    config = TapConfig("vit-block1-out", 300, seeds=(0, 1))
    expected = tap_latents(Denoiser.from_diffusers(source), latents, cond, config)["vit-block1-out"]
    assert torch.allclose(taps.tensor, expected.tensor, atol=1e-5 * float(expected.tensor.abs().max()))


def test_another_prompt_gives_another_tap(source):
    pipe, images = ActivationTapPipeline.from_pipe(source), pictures(1)
    one, other = (pipe.tap(images, text, "vit-block1-out", timestep=300).activations for text in ("a cat", "a horse"))
    assert not torch.equal(one["vit-block1-out"].tensor, other["vit-block1-out"].tensor)


def test_correspondence_and_segmentation_run_on_it(source):
    images, how = pictures(), {"addresses": "vit-block1-out", "timestep": 300}
    found = CorrespondencePipeline.from_pipe(source).match(images[:1], images[:1], [[0.25, 0.75]], temperature=0, **how)
    assert torch.allclose(found[0].points, torch.tensor([[0.25, 0.75]]), atol=0.13)
    masks = torch.zeros(2, 64, 64, dtype=torch.long)
    masks[:, :, 32:] = 1
    labels = SegmentationPipeline.from_pipe(source).segment(images, masks, images, **how)
    assert labels.shape == (2, 64, 64) and set(labels.unique().tolist()) <= {0, 1}
    ranked(SegmentationPipeline.from_pipe(source), images, masks)


def ranked(pipe, images, masks, **how):
    """Of places that every transformer has, those are chosen that were measured."""
    twice = {"images": torch.cat([images, images.flip(0)]), "labels": torch.cat([masks, masks])}
    config = RankingConfig("vit-block1-*", 300, FilterRule(None, None, (None, None)), most=1)
    ranking = pipe.rank(*twice.values(), config=config, **how)
    assert ranking.search is not None and ranking.chosen and set(ranking.chosen) <= set(ranking.properties)


def test_sizes_that_make_no_whole_tokens_are_refused(source):
    pipe = ActivationTapPipeline.from_pipe(source)
    step = pipe._adapter.side_step
    with pytest.raises(VitrineError, match=f"multiples of {step}"):
        pipe.tap(pictures(1, 64 + step // 2), addresses="vit-block1-out", timestep=300)


def test_every_pipeline_has_a_size_of_its_own(source):
    adapter = ActivationTapPipeline.from_pipe(source)._adapter
    side = max(adapter.usual_size())
    assert side > 0 and side % adapter.side_step == 0
    sample_size = source.transformer.config.get("sample_size")
    assert sample_size is None or side == sample_size * adapter.factor


def test_gdfs_protocol_is_refused_in_a_sentence(source):
    refused = pytest.raises(VitrineError, match="protocol: given 'gdf' with .*; accepted: 'vitrine'")
    with refused:
        ActivationTapPipeline.from_pipe(source).tap(pictures(1), addresses="vit-block1-out", protocol="gdf")
    how = {"addresses": "vit-block1-out", "protocol": "gdf"}
    with refused:
        CorrespondencePipeline.from_pipe(source).match(pictures(1), pictures(1), [[0.5, 0.5]], **how)


def test_condition_keeps_what_is_fixed():
    cond = Condition(torch.zeros(1, 2, 3), fixed={"num_tokens": 2})
    assert cond.take(torch.zeros(4, dtype=torch.long)).fixed == {"num_tokens": 2} == cond.cast(torch.float16).fixed
    with pytest.raises(VitrineError, match="the same parts"):
        Condition.batch([cond, Condition(torch.zeros(1, 2, 3), fixed={"num_tokens": 3})])
