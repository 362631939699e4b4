"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

AddressArgument = Annotated[
    str,
    typer.Argument(
        help="The executor's address: shm:///run/symbiosis.sock, tcp://host:7000… Several addresses of one model, "
        "separated by commas, are replicas of it, or serve parts of it.",
        show_default=False,
    ),
]
KeyOption = Annotated[
    Path | None, typer.Option(help="The tenant's secret key file, for tcp:// and dist://; see `symbiosis keys`.")
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        help="Required for dist://; allows tcp:// without keys beyond this host. The network can read the traffic."
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
