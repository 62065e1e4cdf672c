"""``vitrine demo | reproduce | addresses | train portraits | card``."""

from __future__ import annotations

import sys

EXTRAS = "This command needs more packages: pip install torch 'vitrine[demo]'"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one command; bad input is one line on stderr and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    from ..errors import VitrineError

    try:
        return _run(arguments)
    except ImportError as error:
        print(f"vitrine: {error}. {EXTRAS}", file=sys.stderr)
    except VitrineError as error:
        print(f"vitrine: {error}", file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int:
    import tyro

    from . import commands

    table: dict[str, type] = {
        "demo": commands.Demo,
        "reproduce": commands.Reproduce,
        "addresses": commands.Addresses,
        "card": commands.Card,
    }
    if arguments[:2] == ["train", "portraits"]:
        return tyro.cli(commands.train_portraits(), args=arguments[2:], prog="vitrine train portraits").run()
    note = "Also: vitrine train portraits --help"
    return tyro.extras.subcommand_cli_from_dict(table, args=arguments, prog="vitrine", description=note).run()


if __name__ == "__main__":
    sys.exit(main())
