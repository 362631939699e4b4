"""Privacy schemes: mask the rows that leave a client, so that an executor computes with rows it cannot read.

A scheme is given to a client (``privacy=``) and wraps the client's channel, above every transport. It may
import ``core``, ``executor``, ``client``, ``host``, ``terminal``, ``modes``, ``errors`` and ``log``. Start reading at
:mod:`symbiosis.privacy.scheme`. ``docs/privacy.md`` states what each scheme protects against and what it costs.
"""

from symbiosis.privacy.channel import MaskedChannel
from symbiosis.privacy.local_pads import LocalPads
from symbiosis.privacy.noise_pool import NoisePool
from symbiosis.privacy.secret_shares import SecretShares
from symbiosis.privacy.wiretap import Seen, Wiretap

__all__ = ["LocalPads", "MaskedChannel", "NoisePool", "SecretShares", "Seen", "Wiretap"]
