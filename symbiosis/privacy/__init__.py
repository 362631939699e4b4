"""Masks: a tenant's rows leave it so that an executor can compute with them, and cannot read them.

A scheme is given to a client (``privacy=``) and works on its channel, above every transport. What each holds against,
and what it costs, is in ``docs/privacy.md``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symbiosis.privacy.channel import MaskedChannel
    from symbiosis.privacy.local_pads import LocalPads
    from symbiosis.privacy.mixed_noise import MixedNoise
    from symbiosis.privacy.noise_pool import NoisePool
    from symbiosis.privacy.secret_shares import SecretShares
    from symbiosis.privacy.wiretap import Seen, Wiretap

__all__ = ["LocalPads", "MaskedChannel", "MixedNoise", "NoisePool", "SecretShares", "Seen", "Wiretap"]

_HOMES = {
    "LocalPads": "local_pads",
    "MaskedChannel": "channel",
    "MixedNoise": "mixed_noise",
    "NoisePool": "noise_pool",
    "SecretShares": "secret_shares",
    "Seen": "wiretap",
    "Wiretap": "wiretap",
}


def __getattr__(name: str) -> Any:
    """Import each when it is first needed: the core needs the channel, and the wiretap needs the core."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
