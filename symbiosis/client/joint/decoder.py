"""Brings the tenants of a process together before each token, and walks the model for all of them.

A tenant's *seat* stands before the forward of its top-level model. A call for one token, in evaluation mode, without
gradients and with a cache, waits there while another token is under way. When that is done, all who wait are walked
together if they can be, and a tenant that waits by itself walks its own model. Nothing else changes: ``generate``, its
logits processors, streamers and stopping criteria, the tenant's random numbers and its cache are the tenant's own.

A joint walk is a client of the executor like any other. It runs in a fiber of its own, and its requests name its
tenants.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from symbiosis.client.fibers import RandomStream, current_fiber, run_in_fiber
from symbiosis.client.joint.adapters import make_joint, seat_adapters
from symbiosis.client.joint.attention import INNER, NAME, JointCache, Walk, structure, walk
from symbiosis.client.joint.reading import Reading
from symbiosis.client.joint.stacks import Slot, Stacks, give_back
from symbiosis.client.requester import Requester
from symbiosis.client.skeleton import skeleton_for
from symbiosis.client.waiting import ClientThread, LoopWaiter
from symbiosis.core.transport import Channel
from symbiosis.errors import ClientClosedError, SymbiosisError, UsageError
from symbiosis.modes import in_modes


class _Step:
    """One tenant's next token, on its way into a walk."""

    __slots__ = ("alone", "attention", "cache", "ids", "position", "reply", "seat", "structure")

    def __init__(
        self,
        seat: Seat,
        ids: torch.Tensor,
        position: torch.Tensor,
        attention: torch.Tensor | None,
        cache: Any,
        structure: tuple[Any, ...],
        reply: asyncio.Future[Any],
    ) -> None:
        self.seat = seat
        self.ids = ids
        self.position = position
        self.attention = attention
        self.cache = cache
        self.structure = structure
        self.reply = reply
        self.alone = False
        """Whether the tenant is to walk its own model, and to report the end of the token."""


class Seat:
    """One tenant's place before its model. Made by :meth:`JointDecoder.seat`."""

    def __init__(self, decoder: JointDecoder, name: str, model: Any) -> None:
        self.name = name
        self.number = 0
        """The place of its row in walks. Tenants are in the order of their first joint walks, as are stacks' slots."""
        self.decoding = False
        """Whether the running operation of the tenant has decoded a token."""
        self._checked = False
        """Whether the running operation has looked at the whole model."""
        self.version = 0
        """Changes with the reading."""
        self.slots: dict[str, Slot] = {}
        """Places of the tenant's adapters in stacks, by layer."""
        self._decoder = decoder
        self._model = model
        self._reading: Reading | None = None
        self._step: _Step | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the tenant's model has no seat: it walks alone."""
        return

    @property
    def reading(self) -> Reading:
        assert self._reading is not None
        return self._reading

    def leave(self, error: BaseException) -> None:
        """Have the tenant walk alone from now on. If it waits, its wait ends with ``error``."""
        self._model.__dict__.pop(_SEAT, None)
        self._decoder.unseat(self)
        step = self._step
        if step is not None and not step.reply.done():
            step.reply.set_exception(error)

    def give_back(self) -> None:
        """Give the tenant its parameters back. It must not be in an operation."""
        give_back(self.slots.values())
        self.slots = {}

    def rest(self) -> None:
        """Note that the tenant's operation has ended."""
        self.decoding = self._checked = False

    def forward(self, walk_alone: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output for a call, from a joint walk or from the tenant's own."""
        decoder = self._decoder
        inputs = _one_token(self._model, args, kwargs)
        if inputs is None or current_fiber() is None:
            return walk_alone(*args, **kwargs)
        if not decoder.meets_others(self):
            decoder.walked(self.name, "no other client decodes")
            with decoder.token_under_way():
                return walk_alone(*args, **kwargs)
        step = self._prepare(inputs, kwargs)
        if isinstance(step, str):
            decoder.walked(self.name, step)
            return walk_alone(*args, **kwargs)
        output = self._wait(step)
        if output is not None:
            decoder.walked(self.name, None)
            return output
        decoder.walked(self.name, "no other client was ready")
        try:
            return walk_alone(*args, **kwargs)
        finally:
            decoder.token_ended()

    def _wait(self, step: _Step) -> Any:
        fiber, decoder = current_fiber(), self._decoder
        assert fiber is not None
        self._step = step
        decoder.arrive(step)
        try:
            return fiber.wait(step.reply, decoder.channel)
        except BaseException as error:
            decoder.withdraw(step, error)
            raise
        finally:
            self._step = None

    def _prepare(self, inputs: _Inputs, kwargs: dict[str, Any]) -> _Step | str:
        """Return the step for a call, or why it walks alone."""
        ids, cache = inputs
        layers = structure(cache)
        if isinstance(layers, str):
            return layers
        reason = self._decoder.refusal or _not_plain(kwargs)
        if reason is not None:
            return reason
        if ids.shape[0] != 1:
            return "several sequences at once"
        if not self._decoder.may_join(self.name):
            return "the policy holds it back"
        if in_modes():
            return "a torch mode, such as autocast or a hook"
        reading = self._reading
        thorough, self._checked = not self._checked, True
        if reading is None or not reading.is_current(thorough=thorough):
            if reading is None:
                self.number = self._decoder.next_number()
            self._reading = reading = Reading(self._model, self._decoder.model, self._decoder.settings)
            self.version += 1
            if self._decoder.stacks is not None:
                self.slots = self._decoder.stacks.place(self.slots, {} if reading.reason else reading.lora())
                reading.note_places()
        if reading.reason is not None:
            return reading.reason
        if ids.device != self._decoder.device:
            return "another device"
        position, attention = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if position is None:
            if attention is not None and not attention.all():
                return "a mask without positions"
            position = torch.tensor([[cache.get_seq_length()]], device=ids.device)
        elif position.shape != (1, 1):
            return "positions of another shape"
        loop = asyncio.get_running_loop()
        return _Step(self, ids, position, attention, cache, layers, loop.create_future())


class _Inputs(NamedTuple):
    ids: torch.Tensor
    cache: Any


def _one_token(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs | None:
    """Return token and cache of a call that decodes one token of each sequence; None for any other call."""
    ids, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
    if args or ids is None or cache is None or torch.is_grad_enabled() or model.training:
        return None
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] != 1:
        return None
    return _Inputs(ids, cache)


_SEAT = "_symbiosis_seat"
"""Attribute of a tenant's model."""
_USED = {"input_ids", "past_key_values", "position_ids", "attention_mask"}


def _not_plain(kwargs: dict[str, Any]) -> str | None:
    """Return which argument keeps a call from being walked jointly, or None."""
    for name, value in kwargs.items():
        if name in _USED or value is None or value is False:
            continue
        if value is True and name in ("use_cache", "return_dict"):
            continue
        if name == "logits_to_keep" and type(value) is int and 0 <= value <= 1:
            continue
        return f"the argument {name}"
    attention = kwargs.get("attention_mask")
    if attention is not None and not (isinstance(attention, torch.Tensor) and attention.ndim == 2):
        return "the argument attention_mask"
    if kwargs.get("use_cache") is False or kwargs.get("return_dict") is False:
        return "the argument use_cache or return_dict"
    return None


@functools.cache
def _with_seat(cls: type[Any]) -> type[Any]:
    """Return a model class whose forward asks the seat of the instance first."""
    own_forward = cls.forward

    @functools.wraps(own_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seat = self.__dict__.get(_SEAT)
        if seat is None or torch.compiler.is_compiling():
            return own_forward(self, *args, **kwargs)
        return seat.forward(functools.partial(own_forward, self), args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """Copy the model as one of its own class, which has no seat."""
        return _new, (cls,), *super(cls, self).__reduce_ex__(protocol)[2:]

    members = {"forward": forward, "__reduce_ex__": reduce}
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


class JointDecoder:
    """The joint walks of the clients of one executor in one process.

    Args:
        connect: returns a new channel of the executor, for the walks.
        may_join: returns whether the policy lets a client, given its name, take part in a walk now.
        walked: told of each token: the client's name, and why it walked alone, or None.
        exact: compute the adapters' products row by row; otherwise in batches.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Channel]],
        may_join: Callable[[str], bool],
        walked: Callable[[str, str | None], None],
        *,
        exact: bool,
    ) -> None:
        self.refusal: str | None = "no joint walk yet"
        """Why no tenant can be walked jointly, or None."""
        self.channel: Channel | None = None
        self.device = torch.device("cpu")
        self._connect = connect
        self.may_join = may_join
        self.walked = walked
        self.stacks = None if exact else Stacks()
        self._seats: set[Seat] = set()
        self._numbers = 0
        self._model: Any = None
        self.settings: dict[str, Any] = {}
        """Configuration of the base model."""
        self._layers: dict[str, Any] = {}
        self._inner = ""
        self._requester = Requester()
        self._stream: RandomStream | None = None
        self._waiting: list[_Step] = []
        self._walking: Sequence[_Step] = ()
        """Steps of the joint walk under way, by row."""
        self._cache: JointCache | None = None
        self._under_way = 0
        """Tokens under way, joint or not."""
        self._start: asyncio.Handle | None = None
        self._task: asyncio.Task[None] | None = None
        self._seated: tuple[Any, ...] = ()
        """Seats and versions of the readings whose adapters the joint model has."""
        self._opened = False

    @property
    def model(self) -> Any:
        return self._model

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def seat(self, name: str, model: Any) -> Seat:
        """Give a tenant's skeleton a seat."""
        seat = Seat(self, name, model)
        cls: Any = type(model)
        model.__class__ = _with_seat(cls)
        model.__dict__[_SEAT] = seat
        self._seats.add(seat)
        return seat

    def unseat(self, seat: Seat) -> None:
        """Forget a seat."""
        self._seats.discard(seat)
        self._seated = ()
        if not self._walking:
            seat_adapters(self._layers, [])

    def meets_others(self, seat: Seat) -> bool:
        """Note that a tenant decodes. Return whether others may do so at the same time.

        The joint model is made when two tenants first do. From then on a tenant that is not the only one gives the
        others a turn of the event loop to arrive, which takes far less than a token.
        """
        seat.decoding = True
        if not self._opened and any(other.decoding for other in self._seats if other is not seat):
            self._opened = True
            self._task = asyncio.get_running_loop().create_task(self._open())
        return self._opened and len(self._seats) > 1

    # The turn of tokens

    def token_under_way(self) -> _UnderWay:
        return _UnderWay(self)

    def token_began(self) -> None:
        self._under_way += 1

    def token_ended(self) -> None:
        self._under_way -= 1
        self._start_soon()

    def arrive(self, step: _Step) -> None:
        self._waiting.append(step)
        self._start_soon()

    def withdraw(self, step: _Step, error: BaseException) -> None:
        """Note that a tenant does not wait for its token any more."""
        if step in self._waiting:
            self._waiting.remove(step)
        elif self._cache is not None and step in self._walking:
            self._cache.drop(self._walking.index(step), ClientClosedError(str(error)))
        elif step.alone:
            self.token_ended()

    def _start_soon(self) -> None:
        """Begin the next token once everything that is ready on the event loop has run, so that all can join."""
        if self._waiting and not self._under_way and self._start is None:
            self._start = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._start = None
        waiting = [step for step in self._waiting if not step.reply.done()]  # others are about to withdraw
        if self._under_way or not waiting:
            return
        self._waiting = [step for step in self._waiting if step.reply.done()]
        (structure, count), *_ = Counter([step.structure for step in waiting]).most_common(1)
        steps = [step for step in waiting if count > 1 and step.structure == structure]
        for step in waiting:
            if step not in steps:  # it walks at the same time, so that its rows can share batches with the others
                self.token_began()
                step.alone = True
                step.reply.set_result(None)
        if steps:
            self.token_began()
            steps.sort(key=lambda step: step.seat.number)
            self._walking = steps
            self._cache = cache = JointCache([step.cache for step in steps], self._inner)
            self._task = asyncio.get_running_loop().create_task(self._run(steps, cache))

    async def _run(self, steps: Sequence[_Step], cache: JointCache) -> None:
        """Walk the model for several tenants, and give each its output."""
        assert self._stream is not None
        channel = self.channel
        assert channel is not None
        self._requester.tenants = tuple([step.seat.name for step in steps])
        channel.begin_walk()
        try:
            outputs = await run_in_fiber(self._stream, channel, self._walk, steps, cache)
        except BaseException as error:
            # One tenant's token or position may have been wrong. In walks of their own, only this tenant sees it.
            apart = not cache.was_updated and not isinstance(error, SymbiosisError) and isinstance(error, Exception)
            for step in steps:
                if step.reply.done():
                    continue
                if apart:
                    self.token_began()
                    step.alone = True
                    step.reply.set_result(None)
                else:
                    step.reply.set_exception(_copy(error))
            if not isinstance(error, Exception):
                raise
        else:
            for step, output in zip(steps, outputs, strict=True):
                if step.reply.done():
                    continue
                if isinstance(output, Exception):
                    step.reply.set_exception(output)
                else:
                    step.reply.set_result(output)
        finally:
            self._walking, self._cache = (), None
            if not self._seated:  # a tenant has left meanwhile
                seat_adapters(self._layers, [])
            self._requester.forget()
            channel.end_walk()
            self.token_ended()

    @torch.no_grad()
    def _walk(self, steps: Sequence[_Step], cache: JointCache) -> list[Any]:
        """Return each tenant's output, or its error."""
        seated = tuple([(step.seat, step.seat.version) for step in steps])
        if seated != self._seated:
            seat_adapters(self._layers, [(step.seat.reading.adapted, step.seat.slots) for step in steps])
            self._seated = seated
        output = self._forward(
            cache,
            [step.attention for step in steps],
            torch.cat([step.ids for step in steps]),
            torch.cat([step.position for step in steps]),
        )
        logits = output.logits
        return [
            cache.errors.get(row) or type(output)(logits=logits[row : row + 1].clone(), past_key_values=step.cache)
            for row, step in enumerate(steps)
        ]

    def _forward(
        self, cache: JointCache, attention: Sequence[torch.Tensor | None], ids: torch.Tensor, positions: torch.Tensor
    ) -> Any:
        """Return the joint model's output for tokens [N, 1] at positions [N, 1]."""
        token = walk.set(Walk(cache, attention))
        try:
            return self._model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        finally:
            walk.reset(token)

    # Opening and closing

    async def _open(self) -> None:
        """Make the joint model, and try it on two texts."""
        try:
            self.channel = channel = await self._connect()
            self.device = channel.device
            self._stream = RandomStream(channel.device)
            self._requester.open(channel, LoopWaiter(ClientThread("joint", lambda: False)))
            model: Any = skeleton_for(channel, self._requester).eval()
            refusal = _cannot_be_joint(model)
            if refusal is None:
                self._inner = model.config._attn_implementation
                self.settings = model.config.to_dict()
                self._layers = make_joint(model)
                self._model = model
                channel.begin_walk()
                try:
                    refusal = await run_in_fiber(self._stream, channel, self._try)
                finally:
                    self._requester.forget()
                    channel.end_walk()
            self.refusal = refusal
        except Exception as error:  # noqa: BLE001 (tenants walk alone then)
            self.refusal = f"a joint walk failed: {type(error).__name__}: {error}"
        finally:
            self._task = None

    @torch.no_grad()
    def _try(self) -> str | None:
        """Walk two short texts of different lengths, each by itself and both jointly. Return why tenants cannot be
        walked jointly, or None. Code that lets one row depend on another, or on the cache's length, shows here."""
        model, vocabulary = self._model, self._model.config.get_text_config().vocab_size
        texts = [torch.arange(length, device=self.device)[None] * 7 % vocabulary for length in (4, 6)]
        token = torch.full((1, 1), 1, device=self.device)
        alone, caches = [], []
        for text in texts:
            cache = model(input_ids=text, use_cache=True).past_key_values
            if isinstance(reason := structure(cache), str):
                return reason
            caches.append(copy.deepcopy(cache))
            output = model(input_ids=token, past_key_values=cache, use_cache=True)
            if output.keys() - {"logits", "past_key_values"}:
                return "its model has other results than logits"
            alone.append(output.logits)
        model.config._attn_implementation = NAME
        joint = JointCache(caches, self._inner)
        positions = torch.tensor([[text.shape[1]] for text in texts], device=self.device)
        together = self._forward(joint, [None, None], torch.cat([token, token]), positions).logits
        for row, expected in enumerate(alone):
            if error := joint.errors.get(row):
                raise error
            tolerance = 1e-4 if expected.dtype is torch.float32 else 0.05
            if (together[row] - expected[0]).abs().max() > tolerance * expected.abs().max():
                return "its model gives other results for several rows"
        return None

    async def close(self, error: BaseException) -> None:
        """End the walk under way, and leave the executor. Tenants that wait get ``error``."""
        if self._start is not None:
            self._start.cancel()
        for step in [*self._waiting, *self._walking]:
            if not step.reply.done():
                step.reply.set_exception(_copy(error))
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._requester.close()
        if self.channel is not None:
            self.channel.close()


MODES = ("auto", "exact", "fast", "off")
"""Ways to decode jointly; ``auto`` is ``fast``."""


def make_decoder(
    mode: str,
    connect: Callable[[], Awaitable[Channel]],
    may_join: Callable[[str], bool],
    walked: Callable[[str, str | None], None],
) -> JointDecoder | None:
    """Return a decoder for a mode, or None for ``"off"``; see :class:`JointDecoder`.

    Raises:
        UsageError: there is no such mode.
    """
    if mode not in MODES:
        raise UsageError(f"joint is {mode!r}; choose one of {', '.join(MODES)}")
    return None if mode == "off" else JointDecoder(connect, may_join, walked, exact=mode == "exact")


class _UnderWay:
    """A token under way that nobody else is in."""

    def __init__(self, decoder: JointDecoder) -> None:
        self._decoder = decoder

    def __enter__(self) -> None:
        self._decoder.token_began()

    def __exit__(self, *_: object) -> None:
        self._decoder.token_ended()


def _cannot_be_joint(model: Any) -> str | None:
    """Return why a model cannot be walked jointly, or None."""
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return "its model is no decoder of transformers"
    if not model._supports_attention_backend:
        return "its model has attention code of its own"
    if model.config._attn_implementation not in INNER:
        return f"its model's attention is {model.config._attn_implementation}"
    rope = getattr(model.config, "rope_parameters", None) or {}
    if "dynamic" in str(rope) or "longrope" in str(rope):
        return "its positions depend on the longest text of a batch"
    return None


def _copy(error: BaseException) -> BaseException:
    """Return a copy of an error for one of several tenants."""
    if isinstance(error, asyncio.CancelledError):
        return asyncio.CancelledError()
    try:
        copied = type(error)(*error.args)
    except Exception:  # noqa: BLE001 (an error class may take other arguments)
        copied = RuntimeError(str(error))
    copied.__cause__ = error.__cause__
    return copied
