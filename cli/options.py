"""Options shared by several commands, and the options of the command line that settings declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from ..engine.errors import readable
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.option import Option, Options, Setting, chosen, help_of
from ..engine.settings.setting_checks import Writes

Load = Annotated[LoadConfig, arg(name="")]
"""Model loading: `--device`, `--dtype` ... without a prefix on the command line."""

OutSpace = Annotated[Path | None, Writes("file", otherwise="space")]
"""The output file of a changed space; None overwrites the space."""


def flags(usual: Options, *names: str, without: Sequence[str] = (), **flag_names: str) -> Any:
    """In an annotation: these options of the settings are flags of the command, without a prefix.

    ::

        search: Annotated[SearchConfig, flags(SearchConfig(), "effect_fraction", "mode")] = SearchConfig()

    Args:
        usual: settings that are changed, with the flags' defaults.
        names: of its options; without names and other flag names all.
        without: those left out then.
        flag_names: option -> flag, for what two settings of one command call alike.
    """
    shown = {flag_names.get(s.name, s.name): s for s in chosen(type(usual), (*names, *flag_names), without)}

    def changed(**values: Any) -> Options:
        flagged = {setting.name: values[flag] for flag, setting in shown.items()}
        return type(usual)(**{name: getattr(usual, name) for name in usual.__dataclass_fields__} | flagged)

    return _arguments(changed, {flag: (s, s.annotation, getattr(usual, s.name), "") for flag, s in shown.items()})


def overrides(settings: type[Options], *names: str, of: str) -> Any:
    """In an annotation: flags that replace these options of settings which are known later; a dict of those given.

    Args:
        names: of its options; without names all.
        of: whose values are the defaults, for the help text.
    """

    def replaced(**values: Any) -> dict[str, Any]:
        changed = {name: value for name, value in values.items() if value is not None}
        settings(**changed)  # refuses what they do not accept
        return changed

    shown = {setting.name: setting for setting in chosen(settings, names)}
    return _arguments(replaced, {name: (s, s.annotation | None, None, of) for name, s in shown.items()})


def _arguments(made: Callable[..., Any], shown: Mapping[str, tuple[Setting, Any, Any, str]]) -> Any:
    """tyro's mark for a function whose arguments, flag -> (option, type, default, default in words), are flags."""
    only, parameters = inspect.Parameter.KEYWORD_ONLY, []
    for flag, (setting, annotation, default, words) in shown.items():
        made.__annotations__[flag] = _flag(annotation, setting.option, default, words)
        parameters.append(inspect.Parameter(flag, only, default=default))
    made.__annotations__.pop("values")
    made.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return arg(name="", constructor=made)


def _flag(annotation: Any, option: Option, default: Any, words: str) -> Any:
    known = option.unset_doc if default is None and option.unset_doc else readable(default)
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else None
    hint = f"(default: {words or known})"
    return Annotated[annotation, arg(help=help_of(option), help_behavior_hint=hint, metavar=metavar)]
