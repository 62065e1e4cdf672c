"""The `vitrine` command: one tree of commands, parsed by tyro. Heavy imports are deferred until a command runs."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Union

from ..engine.errors import VitrineError, refuse
from ..engine.io import packages
from ..engine.runtime.quiet import quiet_libraries
from ..engine.settings.setting_checks import check_settings
from .console import CLOSED_PIPE, announce, any_letters, drop_stdout, flush_failed, link_written, wide_enough


class Group(NamedTuple):
    """Commands that share a first word: their help text, and name -> dataclass with a method `run`."""

    help: str
    commands: dict[str, type]


@dataclass
class _Unread:
    """In place of a group's commands that this call does not ask for."""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one command.

    Returns:
        The command's exit status; 2 after bad input or if a file cannot be written, explained in one line
        on stderr; 130 after Ctrl-C; 141 after a closed pipe.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    stopped: SystemExit | None = None
    with any_letters():
        try:
            status = _run(arguments)
        except SystemExit as stop:  # after --help
            status, stopped = 0, stop
        unwritten = flush_failed()
    if isinstance(unwritten, BrokenPipeError):
        return CLOSED_PIPE
    if unwritten is not None:
        return _explained(str(unwritten))
    if stopped is not None:
        raise stopped
    return status


def _run(arguments: list[str]) -> int:
    """The exit status of one command."""
    if arguments == ["--version"]:
        print(packages.versions())
        return 0
    try:
        command = _parse(arguments)
        check_settings(command)
        if getattr(command, "slow", True):
            announce(arguments)
        with quiet_libraries():
            status = command.run()
        link_written(command)
        return int(status)
    except ImportError as error:
        remedy = packages.install("demo", "torch")
        return _explained(f"{error}. This command needs more packages: {remedy}")
    except BrokenPipeError:
        drop_stdout()
        return CLOSED_PIPE
    except (VitrineError, OSError) as error:
        return _explained(str(error))
    except KeyboardInterrupt:
        print("vitrine: interrupted", file=sys.stderr)
        return 130


def _explained(message: str) -> int:
    """Prints the message on stderr in one line; returns 2."""
    print("vitrine: " + " ".join(message.split()), file=sys.stderr)
    return 2


GROUPS = {
    "taps": ("tap_commands", "Choose layers of a model to tap."),
    "nemo": ("nemo_commands", "Find and remove the neurons of memorized pictures."),
    "lora": ("copies_commands", "Reports on LoRA files."),
    "w2w": ("w2w_commands", "Spaces of fine-tuned models: train, build, sample."),
    "emd": ("emd_commands", "Distil one-step students."),
}
"""First word -> module of its commands, and its help text."""


def _tree(first_word: str | None = None) -> dict[str, type | Group]:
    """All commands; with a first word, the other groups are left empty, as their modules take time to import."""
    from . import commands

    groups: dict[str, type | Group] = {}
    for name, (module, text) in GROUPS.items():
        asked = first_word in (None, name)
        groups[name] = Group(text, importlib.import_module(f".{module}", __package__).COMMANDS if asked else {})
    return groups | {
        "demo": commands.Demo,
        "reproduce": commands.Reproduce,
        "verify": commands.Verify,
        "addresses": commands.Addresses,
    }


def _parse(arguments: list[str]) -> Any:
    """The command as an instance of its dataclass.

    Raises:
        VitrineError: If a command is unknown, or tyro refuses an argument.
        SystemExit: After `--help`.
    """
    import tyro

    tree = _tree(arguments[0] if arguments else "")
    _check_words(arguments, tree)
    errors = io.StringIO()
    about = (
        "Open a diffusion model like a display case: see what is inside, change it, sample from it. "
        "`vitrine --version` prints versions."
    )
    try:
        with contextlib.redirect_stderr(errors), wide_enough():
            # a help of its own: without one, tyro parses the source of ``typing`` to look for it
            commands: Any = Annotated[_union(tree), tyro.conf.arg(help="One of these")]
            return tyro.cli(commands, args=_at_home(arguments), prog="vitrine", description=about)
    except SystemExit as stop:
        if not stop.code:
            raise
        _check_options(arguments, tree)
        raise VitrineError(_plain(errors.getvalue())) from None


def _at_home(arguments: list[str]) -> list[str]:
    """The arguments with `~` expanded, also after `--out=` and in quotes, where a shell does not expand it."""
    words = []
    for word in arguments:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(option + equals + (os.path.expanduser(value) if value.startswith("~") else value))
    return words


def _check_words(arguments: list[str], tree: dict[str, type | Group]) -> None:
    """Raises for an unknown command, with similar ones."""
    table: dict[str, Any] = dict(tree)
    for word in arguments:
        if word.startswith("-"):
            return
        if word not in table:
            raise refuse("command", word, list(table), "--help explains them")
        entry = table[word]
        if not isinstance(entry, Group):
            return
        table = dict(entry.commands)


def _check_options(arguments: list[str], tree: dict[str, type | Group]) -> None:
    """Refuse an option that the command does not have with the nearest that it has."""
    import tyro

    first = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit), wide_enough():
        tyro.cli(_union(tree), args=[*arguments[:first], "--help"], prog="vitrine")
    known = sorted(set(re.findall(r"--[a-z][\w-]*", page.getvalue())))
    for word in arguments[first:]:
        option = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][\w-]*", option) and option.replace("_", "-") not in known:
            raise refuse("option", option, known, "--help explains them")


def _union(table: dict[str, Any]) -> Any:
    """The type for tyro: a union of the table's commands and groups."""
    from tyro.conf import Suppress, subcommand

    members = []
    for name, entry in table.items():
        if isinstance(entry, Group):
            commands = _union(entry.commands) if entry.commands else _Unread
            members.append(Annotated[commands, subcommand(name, description=entry.help)])
        else:
            members.append(Annotated[entry, subcommand(name)])
    # A union needs two members, even if a group has one command.
    return Union[(*members, Annotated[None, Suppress])]  # noqa: UP007


def _plain(box: str) -> str:
    """tyro's error without frame and title, up to its first rule; frames may be ASCII."""
    lines = [line.strip(" │") for line in box.splitlines()]
    if lines[1:] and lines[1].startswith("---"):
        del lines[:2]
    text: list[str] = []
    for line in lines:
        if line.startswith(("─", "---")) and text:
            break
        if line and line[0] not in "─╭╰":
            text.append(line)
    return " ".join(text) or "the command line could not be read"


if __name__ == "__main__":
    sys.exit(main())
