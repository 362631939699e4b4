"""Where the ``symbiosis`` command begins. It imports the commands where that can be interrupted without a traceback."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symbiosis.cli.commands import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    """The commands, for who imports them from here."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from symbiosis.cli import commands

    return commands.app


def main() -> None:
    """Entry point of the console script."""
    try:
        from symbiosis.cli.commands import app

        app(prog_name="symbiosis")
    except KeyboardInterrupt:  # before there is a command that says so itself
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
