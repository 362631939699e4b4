"""Entry point of the ``symbiosis`` command. Ctrl-C during its imports ends it without a traceback."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command."""
    if os.getpid() == 1:  # the first process of a container, where Linux ignores signals that have no handler
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from symbiosis.cli.commands import app

        app(prog_name="symbiosis")
    except KeyboardInterrupt:  # before a command runs that reports it
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
