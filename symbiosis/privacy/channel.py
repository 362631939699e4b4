"""A channel that sends masked rows only.

It lies between a client and its transports. Rows are masked once, before a transport sees them, so a transport that
reconnects and sends a call again sends the same masked rows.

Products with a weight can be masked: forward and backward of linear layers. Every other call is refused and not sent.
A client with a privacy scheme itself runs modules that the executor would otherwise serve whole.

Legend: n rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from symbiosis.core.requests import Call, Key, LayerSpec, Pass, Results, expected
from symbiosis.core.share import Resident, Share, quantization_in
from symbiosis.core.transport import Channel, Check, Identity, Reply
from symbiosis.errors import ClientClosedError, PrivacyError
from symbiosis.modes import in_modes, modes_aside
from symbiosis.privacy.amplitude import required_amplitude
from symbiosis.privacy.masks import Mask, MaskedKey, MaskedRows, SendCall
from symbiosis.privacy.precision import check_precision
from symbiosis.privacy.side_calls import SideCalls

T = TypeVar("T")
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
        self.identity: Callable[[], Identity] = self._first.identity
        self.before_return: Callable[[Check], None] = self._first.before_return
        self._rounds = quantization_in(self._first.share) is not None
        """Whether layers may round rows to another dtype, as those of bitsandbytes do, unless a key asks for fp32."""
        self._resident = isinstance(self._first.share, Resident)
        """Whether the executor is in this process."""
        self._keys: dict[Key, MaskedKey] = {}
        self._sent_as: dict[Key, MaskedKey] = {}
        """By the key that the executor sees."""
        self._sent: dict[Call, tuple[Call, ...]] = {}
        """Call of the client → masked calls, one for each channel, until it is answered or cancelled."""
        self._side = SideCalls(self.client, len(channels), loop)
        self._released: Future[None] | None = None
        """Done when the mask is released."""
        self.mask = begin(self._channels, partial(self._side.send, self._first))

    def masked_key(self, key: Key) -> MaskedKey:
        """Return how requests for ``key`` are sent with masked rows.

        Raises:
            PrivacyError: the key is not a product with weights.
            RequestError: the layer table has no such key.
        """
        found = self._keys.get(key)
        if found is not None:
            return found
        if key.pass_ is Pass.NORMS:
            raise PrivacyError("DoRA asks for norms of weights, which no privacy scheme covers; use LoRA or rsLoRA")
        (rows, *more), results = expected(self.layers, key)
        specs = tuple([self.layers[layer] for layer in key.layers])
        if more or not all(spec.linear for spec in specs):
            raise PrivacyError(
                f"{specs[0].name} is served whole and is not linear, so its rows cannot be masked; they were not sent. "
                "Serve its linear layers (base_layers='linear' or 'mlp' at the executor)"
            )
        width, dtype = rows
        narrow = dtype.itemsize < 4
        sent = key._replace(fp32=narrow or key.fp32 or (self._rounds and dtype is torch.float32))
        effects = sent._replace(pass_=Pass.FORWARD_WITHOUT_BIAS) if key.pass_ is Pass.FORWARD else sent
        masked = MaskedKey(
            sent, effects, specs, width, tuple(one.width for one in results), torch.float32 if narrow else dtype
        )
        # Rows of both dtypes of a layer are sent under one key, and must not be masked as if they were of two.
        return self._keys.setdefault(key, self._sent_as.setdefault(sent, masked))

    def _masked(self, call: Call) -> tuple[MaskedRows, Unmask]:
        """Mask the rows of a call. The function returns the client's results from those of the executors."""
        key = self.masked_key(call.key)
        masked, not_finite = _in_plain_torch(self._mask_rows, key, call)
        return masked, partial(_in_plain_torch, _unmask_rows, call.tensors[0].dtype, masked.unmask, not_finite)

    def _mask_rows(self, key: MaskedKey, call: Call) -> tuple[MaskedRows, torch.Tensor | None]:
        """Return the masked rows, and which rows [n] are not finite, if any. These are masked as zeros."""
        (x,) = call.tensors
        if self._resident:
            check_precision(self.device, key.dtype)
        amplitudes, not_finite = self.mask.amplitudes, None
        if x.dtype is not key.dtype:
            x = x.to(key.dtype)
        required = required_amplitude(x, amplitudes.least)
        if required is None:
            rms = torch.linalg.vector_norm(x, dim=1) / math.sqrt(x.shape[1])
            not_finite = ~(rms < _INFINITE)
            x = x.masked_fill(not_finite[:, None], 0.0)
            required = required_amplitude(x, amplitudes.least)
            assert required is not None
        amplitude = amplitudes.choose(call.key, call.kind, x.shape[0], required)
        return self.mask.mask(key, x, amplitude, call.kind), not_finite

    @property
    def share(self) -> Share | Resident:
        return self._first.share

    def send(self, call: Call) -> Reply:
        masked, unmask = self._masked(call)
        reply = _MaskedReply(self, call, [], masked.waits, unmask)
        self._sent[call] = masked.calls
        try:
            for channel, part in zip(self._channels, masked.calls, strict=True):
                reply.replies.append(channel.send(part))
        except BaseException:
            reply.abandon()
            raise
        return reply

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

    def begin_walk(self) -> None:
        with contextlib.ExitStack() as begun:
            for channel in self._channels:
                channel.begin_walk()
                begun.callback(channel.end_walk)
            begun.pop_all()

    def end_walk(self) -> None:
        for channel in self._channels:
            channel.end_walk()

    def close(self) -> None:
        self._side.interrupt(ClientClosedError(f"the client {self.client!r} was closed"))
        for channel in self._channels:
            channel.close()
        if self._released is None:
            self._released = self._side.close(self.mask.close)

    async def wait_closed(self) -> None:
        """Wait until the mask is released, which takes until a product and writes to a disk have ended."""
        if self._released is not None:
            await _on_loop(self._released)
            self._side.join()

    async def prepare(self, keys: Iterable[Key]) -> None:
        """Have the scheme prepare for keys, and wait until it is ready."""
        for wait in self._prepare(keys):
            await _on_loop(wait)

    def prepare_blocking(self, keys: Iterable[Key]) -> None:
        """Do the same for synchronous code."""
        for wait in self._prepare(keys):
            self._side.wait(wait)

    def _prepare(self, keys: Iterable[Key]) -> list[Future[Any]]:
        masked = [self.masked_key(key) for key in keys]
        for each in masked if self._resident else ():
            check_precision(self.device, each.dtype)
        with torch.no_grad():
            waits = [self.mask.prepare(each) for each in masked]
        self.flush()
        return [wait for wait in waits if wait is not None]


@dataclass(slots=True, eq=False)
class _MaskedReply:
    """The reply to a masked call.

    Awaiting it waits for all parts and unmasks. No callback, and so no turn of the event loop, lies between the
    executor's answer and the client.
    """

    channel: MaskedChannel
    call: Call
    replies: list[Reply]
    waits: tuple[Future[Any], ...]
    unmask: Unmask
    results: Results | None = None

    def done(self) -> bool:
        return all(reply.done() for reply in self.replies) and all(wait.done() for wait in self.waits)

    def result(self) -> Results:
        if self.results is None:
            try:
                answers = [reply.result() for reply in self.replies]
                for wait in self.waits:
                    wait.result()
            except BaseException:
                self.abandon()
                raise
            self.channel._sent.pop(self.call, None)
            self.results = self.unmask(answers)
        return self.results

    def __await__(self) -> Generator[Any, None, Results]:
        try:
            for reply in self.replies:
                if not reply.done():
                    yield from reply.__await__()
            for wait in self.waits:
                if not wait.done():
                    yield from _on_loop(wait).__await__()
        except BaseException:
            self.abandon()
            raise
        return self.result()

    def abandon(self) -> None:
        """Cancel what was sent. Errors of the replies are of no interest any more, and asyncio does not report them."""
        for reply in self.replies:
            if isinstance(reply, asyncio.Future):
                reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
        self.channel.cancel(self.call)


def _on_loop(future: Future[T]) -> asyncio.Future[T]:
    """Return a future of the running loop that ends as ``future`` does. Cancelling it does not cancel ``future``."""
    return asyncio.shield(asyncio.wrap_future(future))


def _in_plain_torch(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function without gradients, and without the tenant's torch modes, such as autocast."""
    if in_modes():
        with modes_aside(), torch.no_grad():
            return function(*arguments)
    grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # torch.no_grad() takes several times as long
    try:
        return function(*arguments)
    finally:
        torch._C._set_grad_enabled(grad)


def _unmask_rows(
    dtype: torch.dtype, unmask: Unmask, not_finite: torch.Tensor | None, answers: Sequence[Results]
) -> Results:
    """Return unmasked results in the dtype of the call's rows, with NaN for the rows [n] that were not finite."""
    results = unmask(answers)
    if not_finite is not None:
        results = tuple([result.masked_fill(not_finite[:, None], math.nan) for result in results])
    return tuple([result.to(dtype) for result in results])
