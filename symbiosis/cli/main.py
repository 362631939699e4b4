"""Where the ``symbiosis`` command begins. It imports the commands where that can be interrupted without a traceback."""

from __future__ import annotations

import sys

__all__ = ["main"]


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
