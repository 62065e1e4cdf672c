"""What the paper compares with: random neurons, random tokens, an adjusted prompt embedding, scaled attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ...engine.addresses import sites_of
from ...engine.condition import Condition
from ...engine.denoiser import Denoiser
from ...engine.errors import refuse
from ...engine.hooks import Edit, edit
from ...engine.nemo.neurons import NeuronSet, width_of
from ...engine.nemo.sites import value_sites
from ...engine.progress import Progress, silent
from ...engine.site import Site


def random_neurons(backbone: nn.Module, like: NeuronSet, seed: int = 0) -> NeuronSet:
    """As many neurons in the same layers, none of them in ``like`` where the layer leaves that choice.

    (The official baseline builds the list of neurons to avoid and then does not use it.)
    """
    g = torch.Generator().manual_seed(seed)
    table = {s.address: s for s in value_sites(backbone, "all")}
    chosen = {}
    for address, indices in like.neurons.items():
        width = width_of(backbone, table[address])
        order = torch.randperm(width, generator=g).tolist()
        others = [n for n in order if n not in indices] + [n for n in order if n in indices]
        chosen[address] = tuple(others[: len(indices)])
    return NeuronSet(chosen, like.fingerprint, {"baseline": "random neurons", "seed": seed})


def random_tokens(prompt: str, words: Sequence[str], count: int = 4, seed: int = 0) -> str:
    """``count`` words from ``words`` put at random places of the prompt (Somepalli et al. 2023)."""
    if not words or count < 0:
        raise refuse("words, count", (len(words), count), "a word list and a count >= 0", "pass the tokenizer's words")
    g = torch.Generator().manual_seed(seed)
    parts = prompt.split()
    for _ in range(count):
        word = words[int(torch.randint(len(words), (1,), generator=g))]
        parts.insert(int(torch.randint(len(parts) + 1, (1,), generator=g)), word)
    return " ".join(parts)


def adjusted_embedding(
    denoiser: Denoiser,
    cond: Condition,
    empty: Condition,
    noise: torch.Tensor,
    t: float = 981.0,
    *,
    target: float = 3.0,
    lr: float = 0.05,
    steps: int = 10,
    progress: Progress = silent,
) -> Condition:
    """The condition moved until guidance stops pulling: mean over noises of ||eps_c - eps_u|| <= ``target``.

    Wen et al. 2024, section 5.1: AdamW on the text embedding at the first step, the first token left alone. ``target``
    scales with the square root of the latent's size; 3 is the authors' for 4 x 64 x 64.
    """
    if cond.text is None or empty.text is None:
        raise refuse("condition", "no text", "conditions with text states", "encode the prompts first")
    rows = torch.zeros(len(noise), dtype=torch.long)
    with torch.no_grad():
        still = denoiser.predict(noise, t, empty.take(rows)).eps
    first, rest = cond.text[:, :1].detach(), cond.text[:, 1:].detach().clone().requires_grad_(True)
    optimizer = torch.optim.AdamW([rest], lr=lr)

    def text() -> Condition:
        return Condition(torch.cat([first, rest], 1), cond.pooled, cond.extra)

    with torch.enable_grad():
        for step in range(steps):
            pull = (denoiser.predict(noise, t, text().take(rows)).eps - still).flatten(1).norm(dim=1).mean()
            if float(pull.detach()) <= target:
                break
            (gradient,) = torch.autograd.grad(pull, rest)
            rest.grad = gradient
            optimizer.step()
            progress(step + 1, steps, None)
    return Condition(torch.cat([first, rest.detach()], 1), cond.pooled, cond.extra)


def attention_scaling(backbone: nn.Module, factor: float = 1.25, rows: torch.Tensor | None = None) -> Edit:
    """The start token's attention score multiplied by ``factor`` in every cross-attention (Ren et al. 2024, C1).

    A score is q . k, so the start token's key is multiplied. The authors also hide the padding behind the prompt: give
    the network text states without it (:func:`without_padding`), which is the same as a mask of minus infinity.

    Args:
        rows: (B,) bool, the rows with the prompt; None changes all.

    Raises:
        VitrineError: a model without cross-attention keys (SD3 and Flux attend jointly).
    """

    def louder(keys: torch.Tensor) -> torch.Tensor:
        return torch.cat([keys[:, :1] * factor, keys[:, 1:]], 1)

    sites = [s for a, s in sites_of(backbone).items() if a.endswith("-cross-k")]
    if not sites:
        raise refuse("backbone", type(backbone).__name__, "a model with cross-attention", "use SD1.x, SD2.x or SDXL")
    changes: dict[str | Site, Callable] = {s: louder for s in sites}
    return edit(backbone, changes, rows=rows)


def without_padding(cond: Condition, length: int) -> Condition:
    """Text states of the first ``length`` tokens: start token, prompt and end token."""
    if cond.text is None or not 1 <= length <= cond.text.shape[1]:
        given = (length, None if cond.text is None else cond.text.shape[1])
        raise refuse("length, tokens", given, "1 .. the number of tokens", "count the prompt's tokens with both ends")
    return Condition(cond.text[:, :length], cond.pooled, cond.extra)
