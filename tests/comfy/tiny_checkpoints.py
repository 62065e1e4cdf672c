"""Small models of the transformer families as *Load Checkpoint* gives them: MODEL, CLIP and VAE of ComfyUI's classes.

Core tells most of these families apart by their full width, so that a small file would not be known. What stands in
for reading one here is the class core would have chosen, around a small network; text encoder and autoencoder are
small too.
"""

import json
import shutil

import torch
from transformers import CLIPTextConfig, CLIPTextModel
from vitrine.engine.portraits.flow import FLOW_WEIGHTS
from vitrine_tests.comfy.tiny_encoders import KINDS, clip
from vitrine_tests.families.twin import NAMES, comfyui_model, comfyui_twin, conditioning, inputs, network, twin

WIDTHS = {
    name: text.shape[-1]
    for name in NAMES
    for text, _ in conditioning(name, inputs(name, 1)[2])
    if hasattr(twin(name), "MODEL")
}
"""Of the text states that each small network takes from ComfyUI."""


def _text_encoder(folder, width):
    """A folder with a small random text encoder and the flow portraits' tokenizer."""
    shutil.copytree(FLOW_WEIGHTS / "tokenizer", folder / "tokenizer")
    config = json.loads((FLOW_WEIGHTS / "text_encoder" / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": width,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "projection_dim": width,
    }
    torch.manual_seed(6)
    CLIPTextModel(CLIPTextConfig(**config)).save_pretrained(folder / "text_encoder")
    return str(folder)


def _video_vae():
    """Wan's autoencoder, by its state as core reads it."""
    import comfy.sd
    from comfy.ldm.wan.vae import WanVAE

    torch.manual_seed(7)
    net = WanVAE(
        dim=8,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        dropout=0.0,
    )
    state = {name: 0.1 * torch.randn_like(value) for name, value in net.state_dict().items()}
    return comfy.sd.VAE(sd=state, device=torch.device("cpu"), dtype=torch.float32)


def _packed_vae():
    """Flux.2's autoencoder: 32 channels, packed to 128 and normalised by statistics of its own."""
    import comfy.sd

    torch.manual_seed(8)
    sizes = {"ch": 32, "ch_mult": [1, 1, 1, 1], "z_channels": 32, "num_res_blocks": 1, "attn_resolutions": []}
    more = {"double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "dropout": 0.0}
    params = {"ddconfig": sizes | more | {"batch_norm_latent": True}, "embed_dim": 32}
    # core's class around a small network, which its state alone would not tell: built empty, then filled
    vae = comfy.sd.VAE(sd={}, config={"params": params}, device=torch.device("cpu"), dtype=torch.float32)
    net = vae.first_stage_model
    state = {name: 0.1 * torch.randn_like(v) if v.is_floating_point() else v for name, v in net.state_dict().items()}
    state["bn.running_var"] = torch.rand(128) + 0.5
    net.load_state_dict(state)
    vae.downscale_ratio = vae.upscale_ratio = 16
    vae.latent_channels = 128
    return vae


def checkpoint(name, folder):
    """(MODEL, CLIP, VAE) of a family."""
    from vitrine.nodes.comfy.portraits import load_clip, load_vae

    model = comfyui_model(name, comfyui_twin(name, network(name)))
    latents, width = model.get_model_object("latent_format"), WIDTHS[name]
    if latents.latent_channels == 128:
        vae = _packed_vae()
    else:
        vae = _video_vae() if latents.latent_dimensions == 3 else load_vae(str(FLOW_WEIGHTS))
    text = clip(name, width) if name in KINDS else load_clip(_text_encoder(folder, width))
    return model, text, vae
