"""*Tap During Sampling* shows what its place sees while the sampler runs, in ComfyUI's real page."""

import asyncio

from vitrine_tests.lanes import page_modes

BUILD = """(async () => {
    const model = add('VitrineLoadPortraits', 60, 80)
    const text = add('CLIPTextEncode', 60, 300, { text: 'a smiling face with navy shirt on blue' })
    const size = add('EmptyLatentImage', 60, 560, { width: 64, height: 64 })
    const tap = add('VitrineTapDuringSampling', 480, 80, { layers: 'ADDRESS', record_steps: '0 3 7' })
    const sampler = add('KSampler', 960, 80, { steps: 8, seed: SEED }), decode = add('VAEDecode', 1300, 80)
    const shown = add('PreviewImage', 1300, 200)
    join(model, 1, text, 'clip'); join(model, 0, tap, 'model'); join(tap, 0, sampler, 'model')
    join(text, 0, sampler, 'positive'); join(text, 0, sampler, 'negative'); join(size, 0, sampler, 'latent_image')
    join(sampler, 0, decode, 'samples'); join(model, 2, decode, 'vae'); join(decode, 0, shown, 'images')
    const seen = window.seen = [], ended = window.ended = []  // not those of another test in this tab
    window.tap = tap
    const { api } = await import('/scripts/api.js')
    api.addEventListener('b_preview_with_metadata', async ({ detail }) => {
        if (detail.displayNodeId !== String(tap.id)) return
        const entry = { running: !ended.length }
        seen.push(entry)
        entry.bytes = Array.from(new Uint8Array(await detail.blob.arrayBuffer())).join()
    })
    api.addEventListener('execution_success', () => ended.push(1))
})()"""
ON_NODE = "[...document.querySelectorAll(`[data-node-id='${tap.id}'] img`)].map(i => i.naturalWidth)"


async def _walk(driver, address, vue, place):
    async with driver.page(address) as tab:
        await tab.build(BUILD.replace("ADDRESS", place).replace("SEED", str(int(vue))), vue)
        await tab.evaluate("app.queuePrompt(0)")
        await tab.wait_for("window.ended.length && window.seen.every(s => s.bytes)")
        shown = ON_NODE if vue else "(tap.imgs ?? []).map(i => i.naturalWidth)"
        await tab.wait_for(f"String({shown}) === '256'")
        await tab.settle()
        return await tab.evaluate("window.seen"), await tab.evaluate(shown), tab.faults()


@page_modes(None)
def test_pictures_arrive_while_it_runs(driver, address, vue):
    seen, on_node, errors = asyncio.run(_walk(driver, address, vue, "mid-vit-out"))
    assert len(seen) == 3 and len({s["bytes"] for s in seen}) == 3, "after steps 0, 3 and 7"
    assert sum(s["running"] for s in seen) >= 2 and on_node == [256]
    assert not errors


def test_only_recorded_steps_are_watched_and_the_run_is_the_same(comfy):
    import torch
    from vitrine.nodes.activations import first_picture
    from vitrine.nodes.comfy.recording import record_sampling

    model, clip, _ = comfy.call("VitrineLoadPortraits")
    with torch.inference_mode():
        positive = clip.encode_from_tokens_scheduled(clip.tokenize("a smiling face"))

    def sample(patched):
        import comfy.sample

        noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
        with torch.inference_mode():
            return comfy.sample.sample(
                patched,
                noise,
                5,
                2.0,
                "euler",
                "normal",
                positive,
                positive,
                torch.zeros(1, 4, 16, 16),
                seed=3,
                disable_pbar=True,
            )

    watched = []
    for steps in ({0, 2, 4}, lambda step: step in (0, 2, 4)):
        watched.clear()
        patched, recorder = record_sampling(model, "mid-vit-out", steps, watched.append)
        assert torch.equal(sample(patched), sample(model))
        assert [taps.info.step for taps in watched] == [0, 2, 4]
        last = first_picture(recorder.activations(-1, "cond"))
        assert torch.equal(first_picture(watched[-1]), last) and last.shape == (1, 256, 256, 3)
        assert not torch.equal(first_picture(watched[0]), last)
    sample(patched)
    assert len(watched) == 6, "each run anew"
