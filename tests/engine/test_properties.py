"""What holds for every value, not for chosen ones: settings, addresses, noise schedules."""

import dataclasses
import importlib
import json
import math
import pkgutil
import typing
from fnmatch import fnmatchcase

import pytest
import torch
import vitrine.engine
import vitrine.evidence
from hypothesis import given, settings
from hypothesis import strategies as st
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.settings.config import Config
from vitrine.engine.settings.option import Options, settings_of
from vitrine.engine.tracing.addresses import resolve, sites_of
from vitrine_tests import models

QUICK = settings(max_examples=40)
WHOLE, SMALL = st.integers(1, 2**40), st.integers(0, 2**40)
SHARE, TEXT = st.floats(0, 1), st.text(max_size=12)
LEVEL = st.floats(0, 1, exclude_min=True)
POSITIVE = st.floats(1e-9, 1e9)
TOKENS = st.none() | st.lists(st.integers(0, 200), min_size=1, max_size=5).map(tuple)


def values_of(setting):
    """What an option accepts; None where its values are tuples."""
    option, kind = setting.option, setting.annotation
    kinds = {kind} if typing.get_origin(kind) is tuple else set(typing.get_args(kind) or (kind,))
    low = option.ge if option.gt is None else option.gt
    high = option.le if option.lt is None else option.lt
    if option.choices:
        return st.sampled_from(option.choices)
    if kinds & {int} and not kinds - {int, type(None)}:
        least = SMALL if low is None else st.integers(int(low), 2**40 if high is None else int(high))
        return least if kinds == {int} else st.none() | least
    if kinds & {float} and not kinds - {float, type(None)}:
        ends = {"exclude_min": option.gt is not None, "exclude_max": option.lt is not None}
        numbers = st.floats(-1e9 if low is None else low, 1e9 if high is None else high, **ends)
        return numbers if kinds == {float} else st.none() | numbers
    return {frozenset({bool}): st.booleans(), frozenset({str}): TEXT}.get(frozenset(kinds))


FIELDS = {
    "TapConfig": {
        "addresses": st.lists(st.from_regex(r"[a-z0-9*-]{1,20}", fullmatch=True), min_size=1).map(tuple),
        "timestep": st.floats(0, 999), "seeds": st.sets(st.integers(0, 2**63 - 1), min_size=2, max_size=5).map(tuple),
        "size": st.none() | st.integers(1, 65_536), "map_tokens": TOKENS, "modulate": st.just(False),
    },
    "TapInfo": {
        "timestep": st.none() | st.floats(0, 999), "sigma": st.none() | POSITIVE, "step": st.none() | SMALL,
        "seeds": st.lists(SMALL).map(tuple), "prompts": st.lists(TEXT).map(tuple), "model": TEXT, "vitrine": TEXT,
        "extra": st.dictionaries(TEXT, TEXT | st.none() | st.booleans() | st.lists(SMALL, max_size=3), max_size=3),
    },
    "MapReduction": {"tokens": TOKENS, "queries": TOKENS},
    "FilterRule": {"locality": st.tuples(st.none() | st.floats(0, 0.4), st.none() | st.floats(0.5, 1))},
    "ProbeConfig": {
        "steps": st.integers(50, 99), "timestep_index": st.integers(0, 49), "signal": st.just("eps_minus_noise"),
    },
    "SearchConfig": {"theta": st.floats(5, 9), "theta_min": st.floats(0, 4)},
    "BlockConfig": {"start_percent": st.floats(0, 0.5), "end_percent": st.floats(0.5, 1), "tokens": TOKENS},
    "VerifyConfig": {"tau": LEVEL},
    "GammaConfig": {"form": st.sampled_from(("power_cos", "linear")), "points": st.just("")},
    "StudentPreset": {
        "guidance": st.sampled_from((0.0, 1.0)), "shape": st.lists(st.integers(1, 512), max_size=3).map(tuple),
        "betas": st.lists(SHARE, max_size=2).map(tuple),
    },
    "StudentSampling": {"base": TEXT, "timesteps": st.just((999.0, 499.0))},
    "PCAConfig": {"components": WHOLE},
    "BuildConfig": {"components": WHOLE},
    "ResolutionTransferConfig": {"target_size": st.tuples(st.integers(64, 4096), st.integers(64, 4096)),
                                 "train_size": st.none(), "guidance_law": st.just(False)},
    "LoraTrainConfig": {"targets": st.lists(TEXT).map(tuple)},
    "EditConfig": {"protect": st.lists(TEXT).map(tuple)},
    "InvertConfig": {"low": st.integers(0, 500), "high": st.integers(501, 999)},
    "TrainConfig": {"out": TEXT, "pictures": WHOLE, "max_seconds": POSITIVE | st.just(math.inf),
                    "compile": st.booleans(), "seed": SMALL},
    "AdvancedTrainConfig": {"unet_lr": POSITIVE, "plant_share": st.floats(0, 0.99), "vae_batch": WHOLE},
}  # fmt: skip
"""What settings may be that are no options, hold tuples, or depend on each other; others keep their defaults."""


def config_classes():
    """Every class of settings in the engine, by its name's ending or because FIELDS knows it."""
    found = {}
    packages = [(p.__path__, f"{p.__name__}.") for p in (vitrine.engine, vitrine.evidence)]
    for info in (info for package in packages for info in pkgutil.walk_packages(*package)):
        for name, value in vars(importlib.import_module(info.name)).items():
            ours = isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == info.name
            named = name in FIELDS or name.endswith(("Config", "Settings", "Rule", "Contract"))
            if ours and named and not name.startswith("_"):
                found[name] = value
    return found


CLASSES = config_classes()


def made_of(name):
    """Examples of a class of settings, each option anywhere in its range."""
    options = settings_of(CLASSES[name]) if issubclass(CLASSES[name], Options) else ()
    ranges = {s.name: values for s in options if (values := values_of(s)) is not None}
    return st.builds(CLASSES[name], **ranges | FIELDS.get(name, {}))


def test_every_class_of_settings_is_known():
    assert set(FIELDS) <= set(CLASSES)
    lacking = [n for n, c in CLASSES.items() if not (hasattr(c, "to_dict") and hasattr(c, "from_dict"))]
    assert not lacking, "settings go to a dict and back (engine/settings/config.py)"
    assert all(c.__dataclass_params__.frozen for c in CLASSES.values())


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=12)
@given(data=st.data())
def test_settings_round_trip(name, data):
    made = data.draw(made_of(name))
    plain = made.to_dict()
    assert type(made).from_dict(plain) == made
    assert type(made).from_dict(json.loads(json.dumps(plain))) == made
    assert dataclasses.replace(made) == made and hash(str(made)) == hash(str(type(made).from_dict(plain)))


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=1)
@given(data=st.data())
def test_no_setting_takes_what_is_no_number(name, data):
    """Of 140 fields 90 took NaN, and most took a truth value."""
    made = data.draw(made_of(name))
    hints = typing.get_type_hints(type(made))
    for field in dataclasses.fields(made):
        hint = hints[field.name]
        kinds = set(typing.get_args(hint) or (hint,)) - {type(None)}
        strange = [math.nan] if float in kinds else []
        strange += [math.inf, -math.inf] if float in kinds and field.default not in (math.inf, -math.inf) else []
        strange += [True, 2**70, "1"] if kinds <= {int, float} and typing.get_origin(hint) is not tuple else []
        for value in strange:
            with pytest.raises(VitrineError):
                dataclasses.replace(made, **{field.name: value})
                pytest.fail(f"{field.name} {value}")


@pytest.mark.parametrize("name", [n for n in CLASSES if n != "TapInfo"])  # it passes over what later versions add
def test_unknown_settings_are_refused(name):
    required = {"addresses": ["up-*"]} if name == "TapConfig" else {}
    with pytest.raises(VitrineError):
        CLASSES[name].from_dict({**required, "no_such_setting": 1})


@dataclasses.dataclass(frozen=True)
class _Rare(Config):
    limit: float = math.inf
    ends: tuple[float, ...] = (-math.inf, 0.0)
    note: str = "inf"


@dataclasses.dataclass(frozen=True)
class _Usual(Config):
    steps: int = 1
    advanced: _Rare = _Rare()
    second: _Rare | None = None


@settings(max_examples=20)
@given(st.floats(allow_nan=False), st.lists(st.floats(allow_nan=False)).map(tuple), st.booleans())
def test_nested_settings_and_infinity_go_through_json(limit, ends, both):
    rare = _Rare(limit, ends, "inf")
    usual = _Usual(2, rare, rare if both else None)
    assert _Usual.from_dict(json.loads(json.dumps(usual.to_dict(), allow_nan=False))) == usual


# --- addresses ----------------------------------------------------------------------------------------------------
UNET = models.outline(
    sample_size=8,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    cross_attention_dim=8,
    attention_head_dim=4,
    **models.ATTENTION_FIRST,
)
NAMES = list(sites_of(UNET))


def addresses(patterns):
    return [site.address for site in resolve(UNET, patterns)]


@QUICK
@given(st.lists(st.sampled_from(NAMES), min_size=1), st.sampled_from((" ", ",", ", ", "\n", "\n\n ")))
def test_addresses_resolve_once_in_execution_order(chosen, between):
    expected = [name for name in NAMES if name in chosen]
    assert addresses(chosen) == addresses(between.join(chosen)) == expected
    assert addresses(expected) == expected


@QUICK
@given(st.sampled_from(NAMES), st.integers(0, 60), st.integers(0, 60))
def test_globs_find_what_they_match(name, start, length):
    glob = name[:start] + "*" + name[start + length :]
    found = addresses(glob)
    assert name in found and found == [n for n in NAMES if fnmatchcase(n, glob)]
    assert addresses([glob, name]) == found and addresses("*") == NAMES


@QUICK
@given(st.text(max_size=40))
def test_any_text_resolves_or_is_explained(text):
    try:
        found = addresses(text)
    except VitrineError as error:
        assert any(hint in str(error) for hint in [*NAMES, *(f"{name.split('-')[0]}-*" for name in NAMES)])
    else:
        assert found and set(found) <= set(NAMES)


@QUICK
@given(st.sampled_from(NAMES), st.integers(0, 60), st.characters(categories=("Ll",)))
def test_a_slip_of_the_pen_is_refused_with_a_near_name(name, at, letter):
    wrong = name[: at % len(name)] + letter + name[at % len(name) :]
    if wrong not in NAMES:
        with pytest.raises(VitrineError, match="Did you mean"):
            addresses(wrong)


# --- noise schedules ----------------------------------------------------------------------------------------------
@st.composite
def schedules(draw):
    if draw(st.booleans()):
        return NoiseSchedule.flow(draw(st.integers(2, 1000)))
    betas = draw(st.lists(st.floats(1e-4, 0.3), min_size=2, max_size=60))
    return NoiseSchedule.from_betas(torch.tensor(betas, dtype=torch.float64))


def times(schedule, shares):
    last = schedule.steps if schedule.kind == "flow" else schedule.steps - 1
    return torch.tensor(sorted(shares), dtype=torch.float64) * last


SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=20, unique=True)


@QUICK
@given(schedules(), SHARES)
def test_timestep_and_sigma_invert_each_other(schedule, shares):
    t = times(schedule, shares)
    sigma = schedule.sigma(t)
    assert torch.allclose(schedule.timestep(sigma), t, rtol=0, atol=1e-6 * schedule.steps)
    assert torch.allclose(schedule.sigma(schedule.timestep(sigma)), sigma, rtol=1e-9, atol=1e-12)
    assert bool((sigma.diff() >= 0).all()), "more time is more noise"


@QUICK
@given(schedules(), SHARES)
def test_the_maps_agree_with_each_other(schedule, shares):
    t = times(schedule, [0.01 + 0.98 * s for s in shares])
    signal, noise = schedule.scales(t)
    assert torch.allclose(schedule.alpha_bar(t), signal.square(), rtol=1e-10, atol=0)
    assert torch.allclose(schedule.log_snr(t), (signal / noise).square().log(), rtol=1e-9, atol=1e-9)
    total = signal + noise if schedule.kind == "flow" else signal.square() + noise.square()
    assert torch.allclose(total, torch.ones_like(total), rtol=1e-12)
    assert torch.allclose(
        noise / signal,
        schedule.sigma(t) / (1 - schedule.sigma(t)) if schedule.kind == "flow" else schedule.sigma(t),
        rtol=1e-9,
    )


@QUICK
@given(schedules(), st.floats(0.01, 0.99), st.integers(0, 99))
def test_noise_can_be_taken_off_again(schedule, share, seed):
    gen = torch.Generator().manual_seed(seed)
    x0, eps = torch.randn(2, 3, 4, 4, generator=gen).double(), torch.randn(2, 3, 4, 4, generator=gen).double()
    (t,) = times(schedule, [share])
    signal, noise = schedule.scales(t)
    assert torch.allclose((schedule.add_noise(x0, eps, t) - noise * eps) / signal, x0, atol=1e-7)


@QUICK
@given(schedules(), st.floats(allow_nan=True, allow_infinity=True))
def test_times_outside_the_schedule_are_refused(schedule, t):
    last = schedule.steps if schedule.kind == "flow" else schedule.steps - 1
    if 0 <= t <= last:
        assert math.isfinite(schedule.sigma(t))
    else:
        with pytest.raises(VitrineError, match="timestep"):
            schedule.sigma(t)
