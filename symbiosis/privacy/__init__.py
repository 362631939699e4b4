"""Privacy schemes: mask the rows that leave a client, so that an executor computes with rows it cannot read.

A scheme is given to a client (``privacy=``) and wraps the client's channel, above every transport. It may
import ``core``, ``executor``, ``client`` and ``host``. Start reading at :mod:`symbiosis.privacy.scheme`.
``docs/privacy.md`` states what each scheme protects against and what it costs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symbiosis.privacy.channel import MaskedChannel
    from symbiosis.privacy.local_pads import LocalPads
    from symbiosis.privacy.noise_pool import NoisePool
    from symbiosis.privacy.secret_shares import SecretShares
    from symbiosis.privacy.wiretap import Seen, Wiretap

__all__ = ["LocalPads", "MaskedChannel", "NoisePool", "SecretShares", "Seen", "Wiretap"]

_MODULES = {
    "LocalPads": "local_pads",
    "MaskedChannel": "channel",
    "NoisePool": "noise_pool",
    "SecretShares": "secret_shares",
    "Seen": "wiretap",
    "Wiretap": "wiretap",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``import symbiosis.privacy`` does not load torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
