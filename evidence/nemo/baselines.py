"""What the paper compares NeMo with: random neurons and tokens, scaled attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ...engine.errors import refuse
from ...engine.nemo.neurons import NeuronSet
from ...engine.nemo.sites import value_sites
from ...engine.network.condition import Condition
from ...engine.network.site import Site
from ...engine.tracing.addresses import sites_of
from ...engine.tracing.fingerprint import width_of
from ...engine.tracing.hooks import Edit, edit


def random_neurons(backbone: nn.Module, like: NeuronSet, seed: int = 0) -> NeuronSet:
    """As many neurons in the same layers, none of them in ``like`` where the layer has enough others; same factor.

    The official baseline builds the list of neurons to avoid, but does not use it.
    """
    g = torch.Generator().manual_seed(seed)
    table = {s.address: s for s in value_sites(backbone, "all")}
    chosen = {}
    for address, indices in like.neurons.items():
        width = width_of(backbone, table[address])
        order = torch.randperm(width, generator=g).tolist()
        others = [n for n in order if n not in indices] + [n for n in order if n in indices]
        chosen[address] = tuple(others[: len(indices)])
    return NeuronSet(chosen, like.fingerprint, {"baseline": "random neurons", "seed": seed}, like.factor)


def most_frequent(sets: Sequence[NeuronSet], share: float = 0.5) -> NeuronSet:
    """Neurons that at least ``share`` of several searches end with: of one prompt, or of several pictures.

    At the lowest factor of these.
    """
    votes = Counter((address, n) for each in sets for address, numbers in each.neurons.items() for n in numbers)
    chosen: dict[str, list[int]] = {}
    for (address, number), count in sorted(votes.items()):
        if count >= share * len(sets):
            chosen.setdefault(address, []).append(number)
    lowest = min((f for each in sets for address in each.neurons for f in each.factors(address)), default=0.0)
    return NeuronSet({a: tuple(n) for a, n in chosen.items()}, sets[0].fingerprint, factor=lowest)


def random_tokens(prompt: str, words: Sequence[str], count: int = 4, seed: int = 0) -> str:
    """The prompt with ``count`` words from ``words`` at random positions (Somepalli et al. 2023)."""
    if not words or count < 0:
        raise refuse("words, count", (len(words), count), "a word list and a count >= 0", "pass the tokenizer's words")
    g = torch.Generator().manual_seed(seed)
    longer = prompt.split()
    for _ in range(count):
        word = words[int(torch.randint(len(words), (1,), generator=g))]
        longer.insert(int(torch.randint(len(longer) + 1, (1,), generator=g)), word)
    return " ".join(longer)


def attention_scaling(backbone: nn.Module, factor: float = 1.25, rows: torch.Tensor | None = None) -> Edit:
    """The start token's attention score multiplied by ``factor`` in every cross-attention (Ren et al. 2024, C1).

    A score is q . k, so the start token's key is multiplied. The authors also hide the padding behind the prompt: give
    the network text states without it (:func:`without_padding`), which is the same as a mask of minus infinity.

    Args:
        rows: (B,) bool, the rows with the prompt; None changes all.
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
        shown = (length, None if cond.text is None else cond.text.shape[1])
        raise refuse("length, tokens", shown, "1 .. the number of tokens", "count the prompt's tokens with both ends")
    return Condition(cond.text[:, :length], cond.pooled, cond.extra)


PADDINGS = ("hidden", "of the empty prompt", "of the end token", "repeated words")


def other_padding(cond: Condition, empty: Condition, length: int, padding: str, end: bool = False) -> Condition:
    """Text states whose padding is no longer the prompt's own: CLIP's causal padding sums the prompt up once more.

    Needs no detection, since ordinary prompts may be treated alike.

    Args:
        cond, empty: the prompt and the empty prompt, (1, T, D) both.
        length: tokens of the prompt with both ends.
        padding: ``hidden`` (no tokens behind the prompt, as Ren et al. 2024 mask them), ``of the empty prompt`` (its
            states at the same positions), ``of the end token`` (the prompt's first end token repeated), or ``repeated
            words`` (the words' states again and again).
        end: the end token itself counts as padding.
    """
    if padding not in PADDINGS:
        raise refuse("padding", padding, PADDINGS, "hidden is the published one")
    kept = without_padding(cond, length - end).text
    assert kept is not None and cond.text is not None and empty.text is not None
    places = cond.text.shape[1] - kept.shape[1]
    if padding == "hidden" or not places:
        return Condition(kept, cond.pooled, cond.extra)
    words = kept[:, 1 : length - 1]
    behind = {
        "of the empty prompt": lambda: empty.text[:, -places:],  # type: ignore[index]
        "of the end token": lambda: cond.text[:, length - 1 : length].expand(-1, places, -1),  # type: ignore[index]
        "repeated words": lambda: words.repeat(1, -(-places // max(1, words.shape[1])), 1)[:, :places],
    }[padding]()
    return Condition(torch.cat([kept, behind], 1), cond.pooled, cond.extra)
