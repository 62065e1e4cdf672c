"""``vitrine demo | reproduce | addresses | train portraits | card``, and ``vitrine ROOM COMMAND`` for the methods."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable

ROOMS = ("taps", "nemo", "w2w", "control", "resolution", "emd")
"""Rooms with commands of their own: the module of that name in this folder has a table ``COMMANDS``."""

EXTRAS = "This command needs more packages: pip install torch 'vitrine[demo]'"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one command; bad input is one line on stderr and exit status 2, Ctrl-C is 130."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    from ..errors import VitrineError

    try:
        return _run(arguments)
    except ImportError as error:
        print(f"vitrine: {error}. {EXTRAS}", file=sys.stderr)
    except VitrineError as error:
        print(f"vitrine: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("vitrine: interrupted", file=sys.stderr)
        return 130
    return 2


def _run(arguments: list[str]) -> int:
    import tyro

    from . import commands

    table: dict[str, Callable] = {
        "demo": commands.Demo,
        "reproduce": commands.Reproduce,
        "addresses": commands.Addresses,
        "card": commands.Card,
    }
    if arguments[:2] == ["train", "portraits"]:
        return tyro.cli(commands.train_portraits(), args=arguments[2:], prog="vitrine train portraits").run()
    rooms = [r for r in ROOMS if importlib.util.find_spec(f"{__package__}.{r}")]
    if arguments[:1] and arguments[0] in rooms:
        own = importlib.import_module(f"{__package__}.{arguments[0]}").COMMANDS
        prog = f"vitrine {arguments[0]}"
        return tyro.extras.subcommand_cli_from_dict(own, args=arguments[1:], prog=prog).run()
    note = "Also: " + ", ".join(f"vitrine {r} --help" for r in ["train portraits", *rooms])
    return tyro.extras.subcommand_cli_from_dict(table, args=arguments, prog="vitrine", description=note).run()


if __name__ == "__main__":
    sys.exit(main())
