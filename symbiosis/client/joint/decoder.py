"""Brings the clients of a process together before each token, and walks the model for all of them.

A client's *seat* stands before the forward of its top-level model. A call for one token, in evaluation mode, without
gradients and with a cache, waits there while another token is under way. When that token is done, the waiting clients
whose caches and positions have the same structure are walked together, and a client that waits by itself walks its own
model. Nothing else changes: ``generate``, its logits processors, streamers and stopping criteria, the client's random
numbers and its cache are the client's own.

A joint walk is a client of the executor like any other. It runs in a fiber of its own, and its requests name its
clients.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import torch

from symbiosis.client.calls import enter, leave
from symbiosis.client.fibers import RandomStream, current_fiber, run_apart
from symbiosis.client.joint import Here
from symbiosis.client.joint.attention import JointCache, JointError, structure
from symbiosis.client.joint.captured import CapturedWalks, Step
from symbiosis.client.joint.captured_walk import can_capture
from symbiosis.client.joint.entry import Inputs, one_token, why_alone
from symbiosis.client.joint.model import JointModel
from symbiosis.client.joint.reading import Reading, gives_cache
from symbiosis.client.joint.stacks import Slot, Stacks
from symbiosis.client.joint.turn import Turn
from symbiosis.client.kinds import Kinds
from symbiosis.client.requester import Requester
from symbiosis.client.skeleton import skeleton_for
from symbiosis.client.virtlayer import is_compiled
from symbiosis.client.waiting import ClientThread, LoopWaiter
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel
from symbiosis.errors import ClientClosedError, ConnectionLostError, PeerError, WireError, copied
from symbiosis.modes import modes_aside

_ENDED = (PeerError, ConnectionLostError, WireError)
"""Errors after which a channel cannot be used any more."""
_NOT_YET = "no joint walk yet"
_OF_ANOTHER = "an operation of another client calls its model"
_LOST = "the connection of joint walks has ended"


class Seat:
    """Receives the calls of one client's model, and decides whether a token is walked jointly. Made by
    :meth:`JointDecoder.seat`."""

    for_copies = False
    """Whether copies of the model have this seat too."""

    def __init__(self, decoder: JointDecoder, name: str, model: Any, channel: Channel, apart: str) -> None:
        self.name = name
        self.apart = apart
        """Why the client never takes part in walks, or an empty text."""
        self.number = 0
        """Rows of a walk are sorted by this number. The client gets it when its model is first read."""
        self.decoding = False
        """Whether the running operation of the client has decoded a token."""
        self._checked = False
        """Whether the running operation has looked at the whole model."""
        self.version = 0
        """Changes with the reading."""
        self.slots: dict[str, Slot] = {}
        """Places of the client's active adapters in stacks, by layer."""
        self._parked: list[Slot] = []
        """Places of other adapters of the client."""
        self._decoder = decoder
        self._channel = channel
        self._model = model
        self._reading: Reading | None = None
        self._step: Step | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the client's model has no seat: it walks alone."""
        return

    @property
    def reading(self) -> Reading:
        assert self._reading is not None
        return self._reading

    def leave(self, error: BaseException) -> None:
        """Have the client walk alone from now on. If it waits, its wait ends with ``error``."""
        leave(self._model)
        self._decoder.unseat(self)
        step = self._step
        if step is not None and not step.reply.done():
            step.reply.set_exception(error)

    def give_back(self) -> None:
        """Give the client its parameters back. It must not be in an operation."""
        for slot in (*self.slots.values(), *self._parked):
            slot.give_back()
        self.slots, self._parked = {}, []
        if self._decoder.stacks is not None:
            self._decoder.stacks.free()

    def read_again(self) -> None:
        """Have the client's model read again before its next token."""
        self._reading = None

    def rest(self) -> None:
        """Note that the client's operation has ended."""
        self.decoding = self._checked = False

    def forward(self, walk_alone: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output for a call, from a joint walk or from the client's own."""
        if is_compiled():
            return walk_alone(*args, **kwargs)
        decoder = self._decoder
        inputs, fiber = one_token(self._model, args, kwargs), current_fiber()
        if inputs is None or fiber is None:
            return walk_alone(*args, **kwargs)
        apart = self.apart or (_OF_ANOTHER if fiber.observer is not self._channel else "")
        if apart:
            decoder.walked(self.name, apart)
            return walk_alone(*args, **kwargs)
        if not decoder.meets_others(self):
            decoder.walked(self.name, "no other client decodes")
            return walk_alone(*args, **kwargs)
        step = self._prepare(inputs, kwargs)
        if isinstance(step, str):
            decoder.walked(self.name, step)
            return walk_alone(*args, **kwargs)
        output = self._wait(step)
        if output is not None:
            decoder.walked(self.name, None)
            return output
        decoder.walked(self.name, step.alone)
        try:
            return walk_alone(*args, **kwargs)
        finally:
            decoder.turn.ended()

    def _wait(self, step: Step) -> Any:
        fiber, decoder = current_fiber(), self._decoder
        assert fiber is not None
        self._step = step
        decoder.turn.arrive(step)
        try:
            return fiber.wait(step.reply, decoder.channel)
        except BaseException as error:
            decoder.withdraw(step, error)
            raise
        finally:
            self._step = None

    def _prepare(self, inputs: Inputs, kwargs: dict[str, Any]) -> Step | str:
        """Return the step for a call, or why it walks alone."""
        ids, cache = inputs
        layers = structure(cache, len(ids))
        if isinstance(layers, str):
            return layers
        reason = self._decoder.refusal or why_alone(ids, kwargs)
        if reason is not None:
            return reason
        if not kwargs.get("use_cache") and not gives_cache(self._model.config):
            return "a configuration without use_cache"
        if not self._decoder.may_join(self.name):
            return "the policy holds it back"
        reading, joint = self._reading, self._decoder.model
        assert joint is not None
        thorough, self._checked = not self._checked, True
        if reading is None or not reading.is_current(thorough=thorough):
            if reading is None:
                self.number = next(self._decoder.numbers)
            self._reading = reading = Reading(self._model, joint.module, joint.settings)
            self.version += 1
            if self._decoder.stacks is not None:
                held = (*self.slots.values(), *self._parked)
                self.slots, self._parked = self._decoder.stacks.place(held, {} if reading.reason else reading.lora())
                reading.note_places()
        if reading.reason is not None:
            return reading.reason
        if joint.has_other_inputs(cache):
            return "its cache has other inputs than tokens"
        if ids.device != self._decoder.device:
            return "another device"
        position = kwargs.get("position_ids")
        if position is None:
            if joint.moves_positions:
                return "positions of its own"
            position = torch.full((1, 1), cache.get_seq_length(), device=ids.device)  # without waiting for a device
        position = position.expand(*position.shape[:-2], *ids.shape)
        reply = asyncio.get_running_loop().create_future()
        common = (*layers, *position.shape[:-2])
        return Step(self, ids, position, kwargs.get("attention_mask"), cache, common, reply)


class JointDecoder:
    """The joint walks of the clients of one executor in one process.

    When their channel has ended, such as after a long outage, another one is opened once two clients decode at the same
    time. If that fails, the clients walk alone until a further client has joined.

    Args:
        connect: returns a new channel of the executor, for the walks.
        may_join: returns whether the policy lets a client, given its name, take part in a walk now.
        walked: told of each token: the client's name, and why it walked alone, or None.
        here: the executor, if it is in this process and its base layers can be part of a captured walk.
        exact: compute the adapters' products client by client; otherwise in batches.
        most_rows: most rows of a joint walk.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Channel]],
        may_join: Callable[[str], bool],
        walked: Callable[[str, str | None], None],
        here: Here | None = None,
        *,
        exact: bool,
        most_rows: float = math.inf,
    ) -> None:
        self.refusal: str | None = _NOT_YET
        """Why no client can be walked jointly, or None."""
        self.channel: Channel | None = None
        self.device = torch.device("cpu")
        self._connect = connect
        self.may_join = may_join
        self.walked = walked
        self._here = None if exact else here
        self.captured: CapturedWalks | None = None
        self.stacks = None if exact else Stacks()
        self._seats: set[Seat] = set()
        self.numbers = itertools.count(1)
        """The numbers of seats, see :attr:`Seat.number`."""
        self.model: JointModel | None = None
        """None while :attr:`refusal` says why."""
        self._requester = Requester()
        self._stream: RandomStream | None = None
        self.turn = Turn(self._walk_together, most_rows)
        self._walking: Sequence[Step] = ()
        """Steps of the joint walk under way."""
        self._cache: JointCache | None = None
        """The cache of these steps; None while a captured walk serves some of them."""
        self._task: asyncio.Task[None] | None = None
        self._seated: tuple[Any, ...] = ()
        """Seats, versions of the readings whose adapters the joint model has, and numbers of rows."""
        self._opened = False
        self._failed = False
        """Whether no channel could be opened. A further client that joins may show that it is possible again."""

    def seat(self, name: str, model: Any, kinds: Kinds, channel: Channel, apart: str) -> Seat:
        """Give a client's skeleton a seat.

        Args:
            name: the client's name.
            model: its skeleton.
            kinds: the kinds of its rows.
            channel: its channel.
            apart: why it never takes part in walks, or an empty text.
        """
        seat = Seat(self, name, model, channel, apart)
        enter(model, kinds, seat)
        if not apart:
            self._seats.add(seat)
            if self._failed:
                self._opened = self._failed = False
        return seat

    def unseat(self, seat: Seat) -> None:
        """Forget a seat."""
        if seat.apart:
            return
        self._seats.discard(seat)
        self._seated = ()
        if self.captured is not None:
            self.captured.unseat(seat)
        if not self._walking and self.model is not None:
            self.model.seat({})

    def meets_others(self, seat: Seat) -> bool:
        """Note that a client decodes. Return whether others may do so at the same time.

        The joint model is made when two clients decode at the same time for the first time. From then on a client that
        is not the only one gives the others a turn of the event loop to arrive, which takes far less than a token.
        """
        seat.decoding = True
        if not self._opened and any(other.decoding for other in self._seats if other is not seat):
            self._opened = True
            self._task = asyncio.Task(self._open())  # create_task may begin it at once, in this client's fiber
        return self._opened and len(self._seats) > 1

    def withdraw(self, step: Step, error: BaseException) -> None:
        """Note that a client does not wait for its token any more."""
        step.reply.cancel()
        if self._cache is not None and step in self._walking:
            self._cache.drop(self._walking.index(step), ClientClosedError(str(error)))
        else:
            self.turn.withdraw(step)

    def _walk_together(self, steps: Sequence[Step]) -> None:
        """Begin a joint walk."""
        assert self.model is not None
        self._walking = steps = sorted(steps, key=lambda step: step.seat.number)
        self._task = asyncio.get_running_loop().create_task(self._run(self.model, steps))

    async def _run(self, model: JointModel, steps: Sequence[Step]) -> None:
        """Walk the model for several clients, and give each its output. A captured walk serves those that it can."""
        channel = self.channel
        assert channel is not None
        try:
            channel.begin_walk()
            if self.captured is not None:
                _give((await self.captured.outputs(steps, channel)).items())
            left = [step for step in steps if not step.reply.done()]
            if len(left) == 1:
                self.turn.apart(left, "no other client was left by a captured walk")
            elif left:
                await self._run_by_code(model, left, channel)
        except BaseException as error:
            ended = isinstance(error, _ENDED)
            if isinstance(error, Exception) and (self._cache is None or not self._cache.was_updated):
                # One client's token or position may have been wrong. In walks of their own, only this client sees it.
                self.turn.apart(steps, _LOST if ended else "a joint walk failed")
            for step in steps:
                if not step.reply.done():
                    step.reply.set_exception(copied(error))
            if ended:
                self._lost()
            if not isinstance(error, Exception):
                raise
        finally:
            self._walking, self._cache = (), None
            if not self._seated or not self._seats.issuperset(seat for seat, *_ in self._seated):  # a client has left
                self._seated = ()
                model.seat({})
            channel.end_walk()
            self.turn.ended()

    async def _run_by_code(self, model: JointModel, steps: Sequence[Step], channel: Channel) -> None:
        """Walk by the model's own code."""
        assert self._stream is not None
        self._walking = steps
        sizes = [len(step.ids) for step in steps]
        attention = [step.attention for step in steps]
        self._cache = cache = model.cache([step.cache for step in steps], sizes, attention)
        self._requester.joint = {step.seat.name: size / sum(sizes) for step, size in zip(steps, sizes, strict=True)}
        try:
            outputs = await run_apart(self._stream, channel, self._walk, model, steps, cache)
            _give(zip(steps, outputs, strict=True))
        finally:
            self._requester.forget()

    @torch.no_grad()
    def _walk(self, model: JointModel, steps: Sequence[Step], cache: JointCache) -> list[Any]:
        """Return each client's output, or its error."""
        seated = tuple([(step.seat, step.seat.version, len(step.ids)) for step in steps])
        if seated != self._seated:
            clients = [(step.seat.reading.adapted, step.seat.slots) for step in steps]
            model.seat(model.adapters(clients, cache.sizes))
            self._seated = seated
        ids, positions = torch.cat([step.ids for step in steps]), torch.cat([step.position for step in steps], -2)
        with self._requester.kinds.in_call(Kind.DECODE):
            output = model.forward(cache, ids, positions)
        cache.keep_states()
        logits = output.logits.split_with_sizes(cache.sizes)
        return [
            cache.errors.get(place) or type(output)(logits=logits[place].clone(), past_key_values=step.cache)
            for place, step in enumerate(steps)
        ]

    async def _open(self) -> None:
        """Make the joint model, and try it on two texts."""
        try:
            self.channel = channel = await self._connect()
            self.device = channel.device
            self._stream = RandomStream(channel.device)
            self._requester.open(channel, LoopWaiter(ClientThread("joint", lambda: False, set())))
            with modes_aside():
                model = JointModel(skeleton_for(channel, self._requester).eval())
            channel.begin_walk()
            try:
                await run_apart(self._stream, channel, self._try, model, channel.device)
            finally:
                self._requester.forget()
                channel.end_walk()
            self.model, self.refusal = model, None
        except JointError as error:
            self.refusal = str(error)
        except Exception as error:  # noqa: BLE001 (clients walk alone then)
            self.refusal = f"a joint walk failed: {type(error).__name__}: {error}"
            self._failed = isinstance(error, _ENDED)
        finally:
            self._task = None
            if self.model is None:
                self._leave()

    def _lost(self) -> None:
        """Give up a channel that has ended, and the model that was made for it."""
        self._leave()
        self.model, self.refusal, self._opened, self._seated = None, _NOT_YET, False, ()
        for seat in self._seats:
            seat.read_again()
        self.turn.all_apart(_LOST)

    def _leave(self) -> None:
        captured, self.captured = self.captured, None
        if captured is not None:
            captured.forget()
        self._requester.close()
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()

    def _try(self, model: JointModel, device: torch.device) -> None:
        trials = model.check(device)
        if self._here is not None and can_capture(device):
            self.captured = CapturedWalks(model, self._here, self._requester, trials, device)

    async def close(self, error: BaseException) -> None:
        """End the walk under way, and leave the executor. Clients that wait get ``error``."""
        self.turn.close(error)
        for step in self._walking:
            if not step.reply.done():
                step.reply.set_exception(copied(error))
        task = self._task
        try:
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        finally:
            self._leave()


def _give(outputs: Iterable[tuple[Any, Any]]) -> None:
    """Give clients that still wait their outputs, or their errors."""
    for step, output in outputs:
        if step.reply.done():
            continue
        if isinstance(output, StopIteration):  # a future cannot have it
            error = RuntimeError(f"an operation of client {step.seat.name!r} raised StopIteration")
            error.__cause__ = output
            output = error
        if isinstance(output, Exception):
            step.reply.set_exception(output)
        else:
            step.reply.set_result(output)
