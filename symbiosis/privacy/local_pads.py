"""One-time pads: the tenant computes the effects of its noise itself, from its own copy of the public weights.

What is sent is *exactly* uniform, whatever x is (:mod:`symbiosis.privacy.wrapped`). The executor sees only the
amplitude A, a power of two. With the pad n in units of A and the wrapped part 2A·k, x·Wᵀ = s·Wᵀ − A·n·Wᵀ + 2A·k·Wᵀ. The
second term is computed ahead of time. The third concerns one number in several hundred, and is computed from a few
columns of W when the answer arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from symbiosis.core.transport import Channel
from symbiosis.errors import PrivacyError
from symbiosis.privacy.amplitude import WRAPPED_SCALE, check_positive_integers
from symbiosis.privacy.masks import SendCall
from symbiosis.privacy.own_weights import OwnWeights, own_weights
from symbiosis.privacy.pad_folder import PadFolder
from symbiosis.privacy.pads import Pads
from symbiosis.privacy.scheme import Scheme

__all__ = ["LocalPads"]


class LocalPads(Scheme):
    """Each row has a one-time pad, whose effect the tenant computes itself.

    Args:
        model: the public base model that the executor serves: a folder, a hub id or a model.
        rows: pads to keep ready for each key (layers that are requested together, and a direction). Their effects take
            as much memory as the results of so many rows.
        folder: folder for pads, their secret key and their counters, used by one client at a time. By default pads end
            with the process.
        when_out: ``"wait"`` until more pads are computed, or ``"error"``.
        scale: largest ratio of the amplitude to the rms of the largest row; for rows of typical size it is a quarter of
            that. A larger scale hides nothing more; it makes wrapped numbers rarer.
        accuracy: largest error of results, instead of a scale, relative to the result of the request's largest row;
            see :func:`~symbiosis.privacy.amplitude.scale_for`.

    Raises:
        PrivacyError: an option is out of range.
    """

    name = "local-pads"

    def __init__(
        self,
        model: str | Path | nn.Module,
        rows: int = 64,
        folder: str | Path | None = None,
        when_out: str = "wait",
        scale: float | None = None,
        accuracy: float | None = None,
    ) -> None:
        check_positive_integers(self.name, rows=rows)
        if when_out not in ("wait", "error"):
            raise PrivacyError(f"{self.name}: when_out is {when_out!r}; it can be 'wait' or 'error'")
        if folder is not None and not isinstance(folder, str | Path):
            raise PrivacyError(f"{self.name}: folder is {folder!r}; give a path (./{folder} on the command line)")
        self.model, self.rows, self.folder, self.when_out = model, rows, folder, when_out
        self._set_size(scale, accuracy, WRAPPED_SCALE)

    def __repr__(self) -> str:
        return f"{self.name}:rows={self.rows},when_out={self.when_out},{self._describe_size()}"

    def load(self, channel: Channel) -> OwnWeights:
        return own_weights(self.model, channel, self.name)

    def begin(self, channels: Sequence[Channel], send: SendCall) -> Pads:
        (channel,) = channels
        own = self.load(channel)
        folder = None if self.folder is None else PadFolder(self.folder, channel.identity().weights)
        return Pads(own, folder, self.rows, self.when_out == "error", self.amplitudes_for(channel, own.typical))
