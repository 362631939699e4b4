"""A channel that sends masked rows only.

It lies between a client and its transports. Rows are masked once, before a transport sees them, so a transport that
reconnects and sends a call again sends the same masked rows.

Products with a weight can be masked: forward and backward of linear layers. Every other call is refused and not sent.
A client with a privacy scheme runs the modules that the executor would serve whole by itself.

Legend: n rows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import torch

from symbiosis.core.requests import Call, Key, LayerSpec, Pass, expected
from symbiosis.core.share import Resident, Share
from symbiosis.core.transport import Channel, Check, Identity, Reply
from symbiosis.errors import ClientClosedError, PrivacyError
from symbiosis.modes import in_modes, modes_aside
from symbiosis.privacy.amplitude import required_amplitude
from symbiosis.privacy.masks import Mask, MaskedKey, MaskedRows, Results, SendCall
from symbiosis.privacy.side_calls import SideCalls, done_on_loop

__all__ = ["MaskedChannel"]

Unmask = Callable[[Sequence[Results]], Results]

_INFINITE = 2.0**60
"""Root mean square of a row from which on the row counts as infinite."""


class MaskedChannel:
    """The masked channel of one client.

    Args:
        channels: the channel to the client's executor, then those to further executors of the scheme.
        begin: makes the mask, as :meth:`symbiosis.privacy.scheme.Scheme.begin` does.
        loop: the event loop of the channels; None for channels of synchronous code.

    Raises:
        PrivacyError: the scheme does not work with these executors.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        begin: Callable[[Sequence[Channel], SendCall], Mask],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._channels = tuple(channels)
        self._first = channels[0]
        self.client = self._first.client
        self.device = self._first.device
        self.layers: Sequence[LayerSpec] = self._first.layers
        self._keys: dict[Key, tuple[MaskedKey, torch.dtype]] = {}
        """Key → how it is sent, and the dtype of the results for the client."""
        self._sent: dict[Call, tuple[Call, ...]] = {}
        """Call of the client → masked calls, one for each channel, until it is answered or cancelled."""
        self._side = SideCalls(self.client, len(channels), loop)
        self.mask = begin(self._channels, partial(self._side.send, self._first))

    def masked_key(self, key: Key) -> MaskedKey:
        """Return how requests for ``key`` are sent with masked rows.

        Raises:
            PrivacyError: the key is not a product with weights.
            RequestError: the layer table has no such key.
        """
        return self._lookup(key)[0]

    def _lookup(self, key: Key) -> tuple[MaskedKey, torch.dtype]:
        found = self._keys.get(key)
        if found is not None:
            return found
        (width, *more), dtype, results = expected(self.layers, key)
        specs = tuple([self.layers[layer] for layer in key.layers])
        if more or not all(spec.linear for spec in specs):
            raise PrivacyError(
                f"{specs[0].name} is served whole and is not linear, so its rows cannot be masked; they were not sent. "
                "Serve its linear layers (base_layers='linear' or 'mlp' at the executor)"
            )
        narrow = dtype.itemsize < 4
        sent = key._replace(fp32=narrow)
        effects = sent._replace(pass_=Pass.FORWARD_WITHOUT_BIAS) if key.pass_ is Pass.FORWARD else sent
        masked = MaskedKey(sent, effects, specs, width, results, torch.float32 if narrow else dtype)
        return self._keys.setdefault(key, (masked, dtype))

    def _masked(self, call: Call) -> tuple[MaskedRows, Unmask]:
        """Mask the rows of a call. The function returns the client's results from those of the executors."""
        key, dtype = self._lookup(call.key)
        (x,) = call.tensors
        mask, not_finite = self.mask, None
        with _PlainTorch():
            x = x.to(key.dtype)
            required = required_amplitude(x, mask.amplitudes.least)
            if required is None:
                not_finite = ~(_rms(x) < _INFINITE)
                x = x.masked_fill(not_finite[:, None], 0.0)
                required = required_amplitude(x, mask.amplitudes.least)
                assert required is not None
            amplitude = mask.amplitudes.choose(call.key, call.kind, x.shape[0], required)
            masked = mask.mask(key, x, amplitude, call.kind)
        return masked, partial(_unmasked, masked.unmask, dtype, not_finite)

    # The methods of a channel.

    def identity(self) -> Identity:
        return self._first.identity()

    def before_return(self, check: Check) -> None:
        self._first.before_return(check)

    @property
    def share(self) -> Share | Resident:
        return self._first.share

    def send(self, call: Call) -> Reply:
        masked, unmask = self._masked(call)
        replies: list[Reply] = []
        self._sent[call] = masked.calls
        try:
            for channel, part in zip(self._channels, masked.calls, strict=True):
                replies.append(channel.send(part))
        except BaseException:
            self._abandon(call, replies)
            raise
        return _MaskedReply(self, call, replies, masked.waits, unmask)

    def call(self, call: Call) -> Results:
        masked, unmask = self._masked(call)
        further, parts = self._channels[1:], masked.calls[1:]
        side = [self._side.send(channel, part) for channel, part in zip(further, parts, strict=True)]
        try:
            answers = [self._first.call(masked.calls[0]), *map(self._side.wait, side)]
            for wait in masked.waits:
                self._side.wait(wait)
        except BaseException:
            self._side.cancel(further, parts)
            raise
        return unmask(answers)

    def flush(self) -> None:
        for channel in self._channels:
            channel.flush()

    def cancel(self, call: Call) -> None:
        for channel, part in zip(self._channels, self._sent.pop(call, ()), strict=False):
            channel.cancel(part)

    def interrupt(self, error: BaseException) -> None:
        for channel in self._channels:
            channel.interrupt(error)
        self._side.interrupt(error)

    def begin_pass(self) -> None:
        for channel in self._channels:
            channel.begin_pass()

    def end_pass(self) -> None:
        for channel in self._channels:
            channel.end_pass()

    def close(self) -> None:
        self._side.interrupt(ClientClosedError(f"the client {self.client!r} was closed"))
        for channel in self._channels:
            channel.close()
        self.mask.close()
        self._side.close()

    # Preparation ahead of time.

    async def prepare(self, keys: Iterable[Key]) -> None:
        """Have the scheme prepare for keys, and wait until it is ready."""
        for wait in self._prepare(keys):
            if not wait.done():
                await done_on_loop(wait)
            wait.result()

    def prepare_blocking(self, keys: Iterable[Key]) -> None:
        """Do the same for synchronous code."""
        for wait in self._prepare(keys):
            self._side.wait(wait)

    def _prepare(self, keys: Iterable[Key]) -> list[Future[Any]]:
        with torch.no_grad():
            waits = [self.mask.prepare(self.masked_key(key)) for key in keys]
        self.flush()
        return [wait for wait in waits if wait is not None]

    def _answered(self, call: Call) -> None:
        self._sent.pop(call, None)

    def _abandon(self, call: Call, replies: Sequence[Reply]) -> None:
        """Cancel what was sent for a call. Errors of its replies are of no interest any more."""
        for reply in replies:
            if isinstance(reply, asyncio.Future) and not reply.done():
                reply.add_done_callback(_retrieve_error)
            elif reply.done():
                _retrieve_error(cast("asyncio.Future[Any]", reply))
        self.cancel(call)


class _MaskedReply:
    """The reply to a masked call.

    Awaiting it waits for all parts and unmasks. No callback, and so no turn of the event loop, lies between the
    executor's answer and the client.
    """

    def __init__(
        self, channel: MaskedChannel, call: Call, replies: Sequence[Reply], waits: Sequence[Future[Any]], unmask: Unmask
    ) -> None:
        self._channel = channel
        self._call = call
        self._replies = replies
        self._waits = waits
        self._unmask = unmask
        self._results: Results | None = None

    def done(self) -> bool:
        return all(reply.done() for reply in self._replies) and all(wait.done() for wait in self._waits)

    def result(self) -> Results:
        if self._results is None:
            try:
                answers = [reply.result() for reply in self._replies]
                for wait in self._waits:
                    wait.result()
            except BaseException:
                self._channel._abandon(self._call, self._replies)
                raise
            self._channel._answered(self._call)
            self._results = self._unmask(answers)
        return self._results

    def __await__(self) -> Generator[Any, None, Results]:
        try:
            for reply in self._replies:
                if not reply.done():
                    yield from reply.__await__()
            for wait in self._waits:
                if not wait.done():
                    yield from done_on_loop(wait).__await__()
        except BaseException:
            self._channel._abandon(self._call, self._replies)
            raise
        return self.result()


class _PlainTorch:
    """Suspends gradients and the tenant's torch modes, such as autocast. A generator would be four times as slow."""

    __slots__ = ("_grad", "_modes")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._modes = modes_aside() if in_modes() else None
        if self._modes is not None:
            self._modes.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        if self._modes is not None:
            self._modes.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._grad)


def _unmasked(
    unmask: Unmask, dtype: torch.dtype, not_finite: torch.Tensor | None, answers: Sequence[Results]
) -> Results:
    """Return unmasked results in the client's dtype, with NaN for the rows [n] that were not finite."""
    with _PlainTorch():
        results = unmask(answers)
        if not_finite is not None:
            results = tuple([result.masked_fill(not_finite[:, None], math.nan) for result in results])
        return tuple([result.to(dtype) for result in results])


def _rms(x: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each row of x [n, width], as [n]."""
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=1)
    return norms / math.sqrt(x.shape[1])


def _retrieve_error(reply: asyncio.Future[Any]) -> None:
    """Mark the error of a reply as seen, so that asyncio does not report it."""
    if not reply.cancelled():
        reply.exception()
