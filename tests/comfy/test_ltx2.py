"""Why LTX-2 is no family: one block with one set of weights is two functions in the two libraries.

diffusers norms the video before sound is added to it and gives that to the sound; ComfyUI gives the sound what it has
become. If this fails, a library has changed, and LTX-2 can be added: docs/add_a_family.md.
"""

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from vitrine.engine.errors import VitrineError
from vitrine.engine.tracing.addresses import sites_of

VIDEO, AUDIO = 32, 16
RENAMED = {
    "norm_q": "q_norm", "norm_k": "k_norm",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
}  # fmt: skip
EPS = 1e-5
"""Of ComfyUI's qk-norms; diffusers has 1e-6."""


@pytest.fixture(scope="module")
def blocks(comfy):
    """(diffusers', ComfyUI's) with the same weights."""
    from comfy.ldm.lightricks.av_model import BasicAVTransformerBlock
    from comfy.ops import disable_weight_init

    torch.manual_seed(0)
    ours = LTX2VideoTransformerBlock(VIDEO, 2, 16, VIDEO, AUDIO, 2, 8, AUDIO, rope_type="interleaved").eval()
    theirs = BasicAVTransformerBlock(
        VIDEO, AUDIO, 2, 2, 16, 8, v_context_dim=VIDEO, a_context_dim=AUDIO, dtype=torch.float32, device="cpu",
        operations=disable_weight_init,
    ).eval()  # fmt: skip
    for name, module in ours.named_modules():
        if name.endswith(("norm_q", "norm_k")):
            module.eps = EPS
    state = {}
    for name, value in ours.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        state[name] = value
    theirs.load_state_dict(state, strict=True)
    return ours, theirs


def drifts(blocks):
    """How far (video, audio) of the two are apart, of the largest number."""
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(1, *shape, generator=g)  # noqa: E731
    video, audio, texts = draw(12, VIDEO), draw(5, AUDIO), (draw(7, VIDEO), draw(7, AUDIO))
    times = [draw(1, n * width) for n in (6, 4, 1) for width in (VIDEO, AUDIO)]
    ours, theirs = blocks
    with torch.no_grad():
        wanted = ours(video, audio, *texts, *times)
        names = ("v_timestep", "a_timestep", "v_cross_scale_shift_timestep", "a_cross_scale_shift_timestep",
                 "v_cross_gate_timestep", "a_cross_gate_timestep")  # fmt: skip
        found = theirs(
            (video.clone(), audio.clone()), *texts, **dict(zip(names, times, strict=True)), transformer_options={}
        )
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]


def test_the_sound_reads_another_video(blocks):
    video, audio = drifts(blocks)
    assert video < 1e-5 < 1e-4 < audio


def test_that_is_all_that_differs(blocks):
    """Where sound adds nothing to the video, both norm the same numbers."""
    kept = [{k: v.clone() for k, v in block.audio_to_video_attn.state_dict().items()} for block in blocks]
    try:
        for block in blocks:
            for value in block.audio_to_video_attn.to_out.parameters():
                value.data.zero_()
        assert max(drifts(blocks)) < 1e-5
    finally:
        for block, state in zip(blocks, kept, strict=True):
            block.audio_to_video_attn.load_state_dict(state)


def test_comfyuis_network_is_refused_with_the_reason(comfy):
    from comfy.ldm.lightricks.av_model import LTXAVModel

    network = LTXAVModel.__new__(LTXAVModel)
    torch.nn.Module.__init__(network)  # without its billions of weights
    with pytest.raises(VitrineError, match="mix in different orders"):
        sites_of(network)
