"""Real networks of every family that takes control, tiny, each with the call that runs it."""

import torch
from vitrine_tests import models

SMALL = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
}


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, TEXT, POOLED = seeded(2, 4, 8, 8), seeded(2, 5, 16, seed=1), seeded(2, 16, seed=2)
T = torch.tensor([700.0, 200.0])


def unet():
    return models.unet(**SMALL), lambda m, x, t: m(x, t, TEXT[..., :8])[0]


def pixart():
    net = models.pixart(caption_channels=16, use_additional_conditions=True, sample_size=8)

    def call(m, x, t, sizes=((512.0, 300.0), (512.0, 300.0)), text=TEXT):
        told = {"resolution": torch.tensor(sizes), "aspect_ratio": torch.tensor([[1.0], [1.5]])}
        return m(x, encoder_hidden_states=text, timestep=t, added_cond_kwargs=told).sample

    return net, call


def sd3():
    net = models.sd3(
        sample_size=8,
        attention_head_dim=8,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
    return net, lambda m, x, t: m(x, TEXT, POOLED, t)[0]


MODELS = {"unet": unet, "pixart": pixart, "sd3": sd3}
TIME = {"unet": "time_embedding", "pixart": "adaln_single.emb", "sd3": "time_text_embed"}


def build(name):
    net, call = MODELS[name]()
    return net.requires_grad_(False), call


def seen(net, path, run):
    """What the module at ``path`` hands on, other hooks included, and the network's output."""
    kept = []
    handle = net.get_submodule(path).register_forward_hook(lambda m, a, out: kept.append(out.clone()))
    try:
        return run(), kept[-1]
    finally:
        handle.remove()
