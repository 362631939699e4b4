"""Note what the calls of a client's model are for, and route them to the model's seat, if it has one.

The seat of a synchronous client notes when a walk begins and ends (:mod:`symbiosis.client.open_model`), and that of a
client on an event loop may have its tokens walked jointly (:mod:`symbiosis.client.joint.decoder`).
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from symbiosis.client.kinds import Kinds, kind_of_call
from symbiosis.client.parameters import explain_training

_SEAT, _KINDS = "_symbiosis_seat", "_symbiosis_kinds"
"""Attributes of a client's model."""


def enter(model: Any, kinds: Kinds, seat: Any = None) -> None:
    """Note the calls of a model from now on, and let them go to ``seat.forward``, as to that of a
    :class:`~symbiosis.client.joint.decoder.Seat`, if there is a seat."""
    cls: Any = type(model)
    model.__class__ = _noting(cls)
    model.__dict__[_KINDS] = kinds
    if seat is not None:
        model.__dict__[_SEAT] = seat


def leave(model: Any) -> None:
    """Let the calls of a model go to its own forward again."""
    model.__dict__.pop(_SEAT, None)


@functools.cache
def _noting(cls: Any) -> type[Any]:
    """Return a model class whose forward notes the call, and asks the seat of the instance first."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seat = self.__dict__.get(_SEAT)
        noted = contextlib.nullcontext()
        if not torch.compiler.is_compiling():
            noted = self.__dict__[_KINDS].in_call(kind_of_call(args, kwargs))
        with noted:
            if seat is None:
                output = cls.forward(self, *args, **kwargs)  # looked up now: libraries replace it
            else:
                output = seat.forward(functools.partial(cls.forward, self), args, kwargs)
        return explain_training(self, args, output)  # not as a forward hook, with which the model would walk alone

    def reduce(self: Any, protocol: Any) -> Any:
        """Copy the model as one that has no seat, unless copies have the same seat."""
        seat = self.__dict__.get(_SEAT)
        kept = seat if seat is not None and seat.for_copies else None
        state, *more = super(cls, self).__reduce_ex__(protocol)[2:]
        return _new, (cls, kept), {name: value for name, value in state.items() if name != _SEAT}, *more

    members = {"forward": forward, "__reduce_ex__": reduce}
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _new(cls: Any, seat: Any) -> Any:
    new = cls.__new__(_noting(cls))
    if seat is not None:
        new.__dict__[_SEAT] = seat
    return new
