"""Arguments and options that several commands have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from symbiosis.errors import UsageError

AddressArgument = Annotated[
    str,
    typer.Argument(
        help="The executor's address: shm:///tmp/symbiosis.sock, tcp://host:7000, dist://host:7001. Several addresses "
        "of one model, separated by commas, are replicas of it, or serve parts of it; file:///run/list.txt names them "
        "in a file, and http://head:7070/llama asks a cluster for them.",
        show_default=False,
    ),
]
KeyOption = Annotated[
    Path | None, typer.Option(help="The tenant's secret key file, for tcp:// and dist://; see `symbiosis keys`.")
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        help="Required to listen on dist://, and to connect to dist:// on another host; allows tcp:// without keys "
        "beyond this host. The network can read the traffic."
    ),
]
PrivacyOption = Annotated[
    str,
    typer.Option(
        help="How rows are masked before they leave this process: none, noise-pool, local-pads:model=FOLDER or "
        "secret-shares:with=ADDRESS, with options such as noise-pool:size=64,accuracy=1e-4."
    ),
]
RetryOption = Annotated[float, typer.Option(min=0, help="Seconds to wait for an executor that was lost.")]


def options_of(**options: Any) -> dict[str, Any]:
    """Return the transport options that were given."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def host_and_port(text: str, wrong: str, least: int = 0) -> tuple[str, int]:
    """Return the parts of ``HOST:PORT``. Raises UsageError with the text ``wrong`` if it does not have this form, or
    the port is less than ``least``."""
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not re.fullmatch("[0-9]{1,5}", port) or not least <= int(port) < 65536:
        raise UsageError(wrong)
    return host.strip("[]"), int(port)
