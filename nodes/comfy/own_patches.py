"""What the pack itself has put on a MODEL is still there when it runs: nodes behind ours can take its place."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from ...engine.errors import refuse

_KEY = "vitrine.own"
_WORDS = {"model_sampling": "its noise schedule (model_sampling)"}


def put_object(clone: Any, name: str, thing: Any) -> None:
    """Replace an object of a clone's model; the clone refuses to run once another node has replaced it again."""
    clone.add_object_patch(name, thing)
    _note(clone, ("object", name), thing)


def put_wrapper(clone: Any, kind: str, key: str, wrapper: Any) -> None:
    """Add a wrapper to a clone, which refuses to run once another node has taken it away."""
    clone.add_wrapper_with_key(kind, key, wrapper)
    _note(clone, ("wrapper", kind, key), tuple(clone.wrappers[kind][key]))


def remove_wrappers(clone: Any, kind: str, key: str) -> None:
    """Take the wrappers under a key off a clone."""
    clone.remove_wrappers_with_key(kind, key)
    noted = dict(clone.get_attachment(_KEY) or {})
    noted.pop(("wrapper", kind, key), None)
    clone.set_attachments(_KEY, noted)


def _note(clone: Any, place: tuple[str, ...], thing: Any) -> None:
    clone.set_attachments(_KEY, {**(clone.get_attachment(_KEY) or {}), place: thing})  # clones share the former one


def check_own_patches(patcher: Any) -> None:
    """At the start of a run or of a single forward: everything that was noted is in its place."""
    for place, thing in (patcher.get_attachment(_KEY) or {}).items():
        kind, name = place[0], place[-1]
        if kind == "object":
            now = patcher.object_patches.get(name)
            if now is not thing:
                _refuse_replaced(name, now)
        elif kind == "late":
            _check_additive(patcher, thing)
        elif kind == "wrapper" and any(
            wrapper not in patcher.wrappers.get(place[1], {}).get(name, []) for wrapper in thing
        ):
            accepted = "a MODEL with everything that the nodes of Vitrine put on it"
            remedy = "put the node that rebuilds the MODEL before them"
            raise refuse("model", f"its wrapper {name} is gone", accepted, remedy)


def _refuse_replaced(name: str, now: Any) -> None:
    what, by = _WORDS.get(name, name), f"{type(now).__name__} of {owner_of(now)}"
    remedy = "put the node that sets it before the node of Vitrine, which builds on it, or leave one of the two out"
    raise refuse("model", f"{what} was replaced by {by}", "what the node of Vitrine put there", remedy)


def owner_of(thing: Any) -> str:
    """The module that defines it, without the path ComfyUI puts before a custom node's name."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return str(module).replace("\\", "/").rsplit("/", 1)[-1]


# --- weights ------------------------------------------------------------------------------------------------------
def put_weights(clone: Any, key: str, differences: dict[str, Any]) -> None:
    """Add differences to a clone's weights, in place of those added under the same key before."""
    remove_weights(clone, key)
    if not differences:
        return
    values = {name: (difference,) for name, difference in differences.items()}
    accepted = clone.add_patches(values, 1.0)
    assert set(accepted) == set(values)
    _note(clone, ("weights", key), tuple(values.values()))


def remove_weights(clone: Any, key: str) -> None:
    """Take off a clone what :func:`put_weights` has added under a key; all other patches stay."""
    noted = dict(clone.get_attachment(_KEY) or {})
    added = {id(value) for value in noted.pop(("weights", key), ())}
    if not added:
        return
    clone.set_attachments(_KEY, noted)
    kept = {name: [patch for patch in patches if id(patch[1]) not in added] for name, patches in clone.patches.items()}
    clone.patches = {name: patches for name, patches in kept.items() if patches}
    clone.patches_uuid = uuid.uuid4()


def note_late_change(clone: Any, key: str, names: Iterable[str]) -> None:
    """A change of weights that is made inside forwards: patches behind it may only add to those weights."""
    now = {name: len(clone.patches.get(name, ())) for name in names}
    _note(clone, ("late", key), now | late_changes(clone))


def late_changes(model: Any) -> dict[str, int]:
    """Weight that is changed inside forwards -> patches on it before that."""
    noted = model.get_attachment(_KEY) or {}
    return {name: count for place, counts in noted.items() if place[0] == "late" for name, count in counts.items()}


def _check_additive(patcher: Any, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        for _, value, of_model, *_ in patcher.patches.get(name, ())[count:]:
            weights = getattr(value, "weights", None)
            decomposed = isinstance(weights, tuple) and len(weights) > 4 and weights[4] is not None  # DoRA
            if of_model != 1 or decomposed or (isinstance(value, tuple) and value[0] == "set"):
                accepted = "patches that add to the weights, such as LoRAs"
                remedy = "put the node that multiplies, merges or replaces weights before Apply Person (W2W)"
                raise refuse("model", f"{name} changed as a whole behind a late model", accepted, remedy)
