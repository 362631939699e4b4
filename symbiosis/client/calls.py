"""Note what the calls of a client's model are for, and route them to the model's seat, if it has one.

The seat of a synchronous client notes when a walk begins and ends (:mod:`symbiosis.client.open_model`), and that of a
client on an event loop may have its tokens walked jointly (:mod:`symbiosis.client.joint.decoder`).
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import GenerationMixin

from symbiosis.client.kinds import Kinds, kind_of_call
from symbiosis.errors import UsageError
from symbiosis.training.step import NOTHING_TRAINS

_SEAT, _KINDS = "_symbiosis_seat", "_symbiosis_kinds"
"""Attributes of a client's model. Models inside it have the kinds only."""
_PLAIN = "_symbiosis_plain"
"""Attribute of the class of a model whose calls are noted."""


def enter(model: Any, kinds: Kinds, seat: Any = None) -> None:
    """Note the calls of a model from now on, and let them go to ``seat.forward``, as to that of a
    :class:`~symbiosis.client.joint.decoder.Seat`, if there is a seat.

    Calls of models inside are noted too: ``generate`` of BLIP-2 and others is that of the language model inside.
    """
    for inner in list(model.modules()):
        if inner is not model and isinstance(inner, GenerationMixin):
            _note(inner, kinds, outer=False)
    _note(model, kinds, outer=True)
    if seat is not None:
        model.__dict__[_SEAT] = seat


def _note(model: Any, kinds: Kinds, outer: bool) -> None:
    cls: Any = type(model)
    model.__class__ = _noting(cls, outer)
    model.__dict__[_KINDS] = kinds


def plain_class(cls: type[Any]) -> type[Any]:
    """Return the class that a model had before its calls were noted."""
    plain: type[Any] = cls.__dict__.get(_PLAIN, cls)
    return plain


def leave(model: Any) -> None:
    """Let the calls of a model go to its own forward again."""
    model.__dict__.pop(_SEAT, None)


class FrozenLoss(torch.Tensor):
    """The loss of a model in which nothing is trainable. Its backward pass raises UsageError, which says what to do;
    torch's error would say that the loss does not require grad."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        if not self.requires_grad:  # a sum with another loss may
            raise UsageError(NOTHING_TRAINS)
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_idle: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models of clients that were in training mode and had nothing to train when they last computed a loss."""


@_disable_dynamo  # the compiler cannot read shared parameters
def _note_loss(model: Any, output: Any) -> None:
    """Note whether anything in a model is trainable, and have its loss say what to do if not."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        trains = any(parameter.requires_grad for parameter in model.parameters())
        (_idle.add if model.training and not trains else _idle.discard)(model)
        if not loss.requires_grad:
            output.loss = loss.as_subclass(FrozenLoss)


def check_trains(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise UsageError for an optimizer of a client's model if neither has anything to train. The backward pass does
    not show it if inputs require gradients, as for checkpointing. Serves as a pre-hook of all optimizers' steps."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.requires_grad for parameter in parameters):
        return
    for model in list(_idle):
        own = set(model.parameters())
        # Trainer leaves frozen parameters out, so an optimizer of a client's model may have none at all.
        if not any(one.requires_grad for one in own) and (not parameters or not own.isdisjoint(parameters)):
            _idle.discard(model)
            raise UsageError(f"the optimizer has no trainable parameter: {NOTHING_TRAINS}")


register_optimizer_step_pre_hook(check_trains)


@functools.cache
def _noting(cls: Any, outer: bool) -> type[Any]:
    """Return a model class whose forward notes the call, and asks the seat of the instance first.

    Args:
        cls: the model's class.
        outer: whether the model is a client's own, and not one inside it.
    """

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A tenant may have made another model of this class. A base layer refuses to be exported, and says why.
        if _KINDS not in self.__dict__ or torch.compiler.is_exporting():
            return cls.forward(self, *args, **kwargs)
        return noted(self, args, kwargs)

    @_disable_dynamo(recursive=False)  # what it calls is compiled; the requests of compiled code need the note as well
    def noted(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kinds, seat = self.__dict__[_KINDS], self.__dict__.get(_SEAT)
        with kinds.in_call(kind_of_call(args, kwargs)):
            if seat is None:
                output = cls.forward(self, *args, **kwargs)  # looked up now: libraries replace it
            else:
                output = seat.forward(functools.partial(cls.forward, self), args, kwargs)
        if outer and torch.is_grad_enabled():
            _note_loss(self, output)
        return output

    def reduce(self: Any, protocol: Any) -> Any:
        """Copy the model as one that has no seat, unless copies have the same seat."""
        seat = self.__dict__.get(_SEAT)
        kept = seat if seat is not None and seat.for_copies else None
        state, *more = super(cls, self).__reduce_ex__(protocol)[2:]
        return _new, (cls, outer, kept), {name: value for name, value in state.items() if name != _SEAT}, *more

    members = {"forward": forward, "__reduce_ex__": reduce, _PLAIN: cls}
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _new(cls: Any, outer: bool, seat: Any) -> Any:
    new = cls.__new__(_noting(cls, outer))
    if seat is not None:
        new.__dict__[_SEAT] = seat
    return new
