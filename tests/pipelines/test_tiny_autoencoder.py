"""AutoencoderTiny in the place of a VAE: what people with little memory use."""

import torch
from diffusers import AutoencoderTiny
from vitrine.engine.activations.picture_latents import encode_pixels
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.portraits import load_portraits


def tiny(channels):
    widths, blocks = (8, 8, 8), (1, 1, 1)
    return AutoencoderTiny(
        latent_channels=channels,
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        num_encoder_blocks=blocks,
        num_decoder_blocks=blocks,
    )


def test_it_is_a_vae():
    pipe = load_portraits().pipeline()
    vae = tiny(pipe.unet.config.in_channels)
    pipe.vae = vae
    ours = NEMOPipeline.from_pipe(pipe)
    assert ours.vae is vae
    pictures = torch.rand(2, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        latents = encode_pixels(vae, pictures, "mean")
        assert torch.allclose(latents, vae.encode(pictures).latents) and latents[0].ne(latents[1]).any()
