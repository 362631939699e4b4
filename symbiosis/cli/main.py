"""Entry point of the ``symbiosis`` command. Ctrl-C during its imports ends it without a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command."""
    try:
        from symbiosis.cli.commands import app

        app(prog_name="symbiosis")
    except KeyboardInterrupt:  # before a command runs that reports it
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
