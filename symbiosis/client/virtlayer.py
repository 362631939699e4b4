"""VirtLayer: what stands for a base layer in a client's model.

To ``transformers`` and PEFT a VirtLayer *is* the ``nn.Linear`` or ``Conv1D`` that it replaces (D8). Its forward sends
the rows to the executor and waits; so does its backward. How it waits depends on where it is called, which is the
business of the client's :class:`Link`: in a fiber it suspends, on any other thread it blocks.

Autograd: the result is computed first and wrapped in an autograd node afterwards, because a fiber cannot suspend inside
``autograd.Function.forward``. Siblings (q, k, v; gate, up) share the forward request, but each has a node of its own,
made when the model calls it: the engine then adds up gradients in the order that it has in the plain model, and a
client alone is bit-equal to it. One node for all siblings would save two backward round trips and lose that.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from greenlet import getcurrent
from torch import nn
from torch.autograd import forward_ad
from transformers.pytorch_utils import Conv1D

from symbiosis.client.fibers import Fiber, RandomStream
from symbiosis.client.parameters import SharedParameter, fetch_of, placeholder, share, values_of
from symbiosis.client.placeholders import Product, introduce
from symbiosis.core.requests import Call, Key, LayerSpec, Pass
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel
from symbiosis.errors import CannotWaitError, ClientClosedError, PlaceholderError, PrivacyError, RequestError

__all__ = [
    "Link",
    "VirtConv1D",
    "VirtLayer",
    "VirtLinear",
    "VirtModule",
    "finetuning",
    "rehearse",
    "virtualize",
]


on_thread = threading.local()
"""``link``: whose backward thread this is. ``cores``: how many its operators use when it has the process to itself."""


class _Model:
    """Which copy of a client's model a layer belongs to: ``copy.deepcopy`` copies this along with the layers."""


class _Fetched:
    """What one request of a group brought to one thread, less what its members have come for already."""

    __slots__ = ("misses", "pass_", "results", "version", "x")

    def __init__(self, x: torch.Tensor, pass_: Pass, results: dict[VirtLayer, torch.Tensor], misses: int) -> None:
        self.x = x
        self.version = x._version
        self.pass_ = pass_
        self.results = results
        self.misses = misses
        """How often in a row, before this, somebody's result was not wanted."""


class Here:
    """What a link remembers for one thread: threads that share a model each walk it with rows of their own."""

    __slots__ = ("fetched", "kind", "last_input", "layer", "pass_", "product", "rows", "run")

    def __init__(self) -> None:
        self.last_input: weakref.ref[torch.Tensor] | None = None
        self.run: list[VirtLayer] = []
        """Layers that were fed the last input, so far."""
        self.pass_ = Pass.FORWARD
        self.fetched: dict[Siblings, _Fetched] = {}
        self.product: Product | None = None
        self.layer = -1
        """That was asked last, of a forward pass without gradients."""
        self.kind = Kind.DECODE
        """What for."""
        self.rows = 0
        """Of the largest request of that walk, if it is a prefill's."""

    def kind_of(self, layer: int, x: torch.Tensor) -> Kind:
        """What rows are for that are sent without gradients: more than one of a sequence are a prompt's. Some models
        flatten sequences on the way (OPT), and the last layer is asked for a prompt's last token alone: the rest of a
        prompt's walk is a prompt's too."""
        rows = x.shape[:-1].numel()
        if layer > self.layer and self.kind is Kind.PREFILL and rows <= self.rows:
            kind = Kind.PREFILL
        else:
            kind = Kind.PREFILL if x.ndim > 2 and x.shape[-2] > 1 else Kind.DECODE
            self.rows = rows
        self.layer, self.kind = layer, kind
        return kind


class _Threads(threading.local):
    def __init__(self) -> None:
        self.here = Here()


class _Pretending(threading.local):
    now = False


class Link:
    """What the VirtLayers of one client share: the channel, how to wait on it, and which layers are siblings."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.loop_thread: int | None = None
        """Thread of the event loop, where only a fiber can wait; None for a client without a loop."""
        self.interrupted: BaseException | None = None
        """Raised by the next call from a thread, so that a cancelled backward ends."""
        self.model = _Model()
        """Of layers that are not copies."""
        self.private = False
        """Whether rows go out masked, so that nothing but products with a weight can be asked for."""
        self.finetuning = False
        """Whether forward passes without gradients belong to a training step too."""
        self.stream_on_thread: RandomStream | None = None
        """Set while the client's thread draws random numbers, to be left while it waits."""
        self.backward_began: Callable[[], None] | None = None
        """Called before each backward request, where nobody else says when a backward pass begins."""
        self._threads = _Threads()
        self._grouping = threading.Lock()
        self._pretending = _Pretending()

    @property
    def here(self) -> Here:
        """What is remembered for this thread."""
        return self._threads.here

    @contextlib.contextmanager
    def pretending(self) -> Iterator[None]:
        """Meanwhile requests of this thread are answered with zeros, and not sent."""
        self._pretending.now = True
        try:
            yield
        finally:
            self._pretending.now = False
            self.forget_here()

    def forget(self) -> None:
        """Drop what a pass that ended, or was interrupted, left behind on whatever thread."""
        self.forget_here()
        self._threads = _Threads()

    def forget_here(self) -> None:
        """The same for this thread alone."""
        run = self._threads.here.run
        if len(run) > 1:
            self._group(run)
        self._threads.here = Here()

    def request(self, key: Key, kind: Kind, tensors: tuple[torch.Tensor, ...], name: str) -> tuple[torch.Tensor, ...]:
        """Send a request and wait for its results."""
        channel = self.channel
        if channel is None:
            raise ClientClosedError(f"{name}: the client of this model was closed; its base layers are gone with it")
        home = tensors[0].device
        if home != channel.device:
            tensors = tuple(tensor.to(channel.device) for tensor in tensors)
            return tuple(result.to(home) for result in self._wait(channel, Call(key, kind, tensors), name))
        return self._wait(channel, Call(key, kind, tensors), name)

    def _wait(self, channel: Channel, call: Call, name: str) -> tuple[torch.Tensor, ...]:
        # What such transforms wrap would be merged with other tenants' rows, and theirs would come back wrapped.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise CannotWaitError(f"{name}: torch.func transforms (vmap, grad, jvp…) cannot be used on this model")
        if forward_ad._current_level >= 0 and any(map(_has_tangent, call.tensors)):
            raise CannotWaitError(f"{name}: forward-mode differentiation cannot be used on this model")
        backward = call.key.pass_.is_backward
        fiber = getcurrent()
        if isinstance(fiber, Fiber):
            if torch._C._current_graph_task_id() != -1:
                raise CannotWaitError(
                    f"{name}: loss.backward() was called inside a fiber, where autograd cannot be suspended; "
                    "return the loss and `await client.backward(loss)` instead"
                )
            reply = channel.send(call)
            if reply.done():
                return reply.result()
            try:
                return fiber.wait(reply, channel)
            except BaseException:
                channel.cancel(call)
                raise
        if threading.get_ident() == self.loop_thread:
            verb = "backward(loss)" if backward else "forward(...), generate(...) or run(fn, ...)"
            raise CannotWaitError(
                f"{name}: this model was called directly on the event loop, which would wait for itself; "
                f"use `await client.{verb}`, or call it from another thread"
            )
        if self.interrupted is not None:
            raise self.interrupted
        if getattr(on_thread, "link", self) is not self:
            raise CannotWaitError(
                f"{name}: this backward pass goes through the models of two clients; each has a thread of its own, so "
                "detach the one from the other, or call backward for each"
            )
        if self.stream_on_thread is None:
            return channel.call(call)
        self.stream_on_thread.leave()
        try:
            return channel.call(call)
        finally:
            self.stream_on_thread.enter()

    def watch(self, layer: VirtLayer, x: torch.Tensor, pass_: Pass) -> None:
        """See which layers are fed the very same tensor one after another: they are siblings from then on (D9)."""
        here = self._threads.here
        last = here.last_input
        if last is not None and last() is x and here.pass_ is pass_:
            if layer in here.run:
                return
            if all(layer.may_be_sibling_of(other) for other in here.run):
                here.run.append(layer)
                return
        if len(here.run) > 1:
            self._group(here.run)
        here.run = [layer]
        here.pass_ = pass_
        here.last_input = weakref.ref(x)

    def _group(self, run: list[VirtLayer]) -> None:
        with self._grouping:
            # Another thread may have seen the same meanwhile.
            if all(member._siblings is None and member._may_have_siblings for member in run):
                group = Siblings(run)
                for member in run:
                    member._siblings = group

    def dissolve(self, group: Siblings) -> None:
        """These are no siblings after all."""
        with self._grouping:
            for member in group.members:
                member._siblings = None
                member._may_have_siblings = False
        self._threads = _Threads()  # what other threads have fetched for the group: nobody would come for it


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class Siblings:
    """Layers that read the same rows: one request serves them all.

    Whoever is called first sends it; the others find their results here. Where that keeps failing (the model skips one,
    or feeds it something else) the group was a mistake and is dissolved.
    """

    def __init__(self, members: list[VirtLayer]) -> None:
        self.members = sorted(members, key=lambda member: member.spec.layer)
        self.keys = {
            pass_: Key(tuple(member.spec.layer for member in self.members), pass_)
            for pass_ in (Pass.FORWARD, Pass.FORWARD_WITHOUT_BIAS)
        }

    def forward(self, layer: VirtLayer, x: torch.Tensor, pass_: Pass) -> torch.Tensor | None:
        """The layer's [n, o]; None if the group has just been dissolved."""
        mine = layer._link._threads.here.fetched
        misses = 0
        fetched = mine.get(self)
        if fetched is not None:
            if fetched.x is x and x._version == fetched.version and pass_ is fetched.pass_:
                result = fetched.results.pop(layer, None)
                if result is not None:
                    if not fetched.results:
                        del mine[self]
                    return result
            del mine[self]
            misses = fetched.misses + 1
            if misses == _MISSES:
                layer._link.dissolve(self)
                return None
        results = dict(zip(self.members, layer._request(self.keys[pass_], x), strict=True))
        mine[self] = _Fetched(x, pass_, results, misses)
        return results.pop(layer)


_MISSES = 3


class VirtLayer(nn.Module):
    """Common to all VirtLayers. ``spec`` is the layer's row in the layer table."""

    spec: LayerSpec
    _link: Link
    _siblings: Siblings | None
    _may_have_siblings: bool
    _model: _Model

    def _attach(self, spec: LayerSpec, link: Link) -> None:
        self.spec = spec
        self._link = link
        self._siblings = None
        self._may_have_siblings = True
        self._model = link.model
        self._keys = {pass_: Key((spec.layer,), pass_) for pass_ in Pass}

    def _call(self, x: torch.Tensor, pass_: Pass = Pass.FORWARD) -> torch.Tensor:
        """[..., i] → [..., o], as the base layer would have done, with a backward that asks the executor again."""
        spec = self.spec
        shape = x.shape
        if shape[-1] != spec.in_features:
            raise RequestError(f"{spec.name}: input is {list(shape)}; its last dimension must be {spec.in_features}")
        autocast = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)
        if x.dtype is not spec.dtype:
            if not autocast or not x.is_floating_point():
                raise RequestError(
                    f"{spec.name}: input is {x.dtype}, but the base model is served in {spec.dtype}; "
                    f"cast the input, or use torch.autocast"
                )
            x = x.to(spec.dtype)
        y: torch.Tensor | None = None
        if not x.numel():
            y = x.new_empty(0, spec.out_features)
        elif self._may_have_siblings and spec.linear and not x.is_inference():
            siblings = self._siblings
            if siblings is None:
                self._link.watch(self, x, pass_)
            elif not self._link._pretending.now:
                y = siblings.forward(self, x, pass_)
        if y is None and self._link._pretending.now:
            y = x.new_zeros(shape[:-1].numel(), spec.out_features)
        elif y is None:
            (y,) = self._request(self._keys[pass_], x)
        if x.requires_grad and torch.is_grad_enabled():
            # Not a view: nn.Linear allows in-place operations on its output, torch forbids them on a view made here.
            y = _wrap(x, self, [torch.ops.aten._unsafe_view(y, (*shape[:-1], spec.out_features))])
        else:
            y = y.view(*shape[:-1], spec.out_features)
        return y.to(torch.get_autocast_dtype(x.device.type)) if autocast else y

    def may_be_sibling_of(self, other: VirtLayer) -> bool:
        """Whether one request can be for both: other layers, of the same copy of the model."""
        return self.spec.layer != other.spec.layer and self._model is other._model

    def _request(self, key: Key, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        link = self._link
        if torch.is_grad_enabled() or link.finetuning or self.training:
            kind = Kind.FINETUNE
        else:
            kind = link._threads.here.kind_of(key.layers[0], x)
        rows = (x.detach() if x.requires_grad else x).reshape(-1, self.spec.in_features)
        if type(rows) is not torch.Tensor:  # a subclass would take part in what the executor computes for others
            rows = rows.as_subclass(torch.Tensor)
        return link.request(key, kind, (rows,), self.spec.name)

    def _backward(self, dy: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        """[..., o] → [..., i]."""
        spec = self.spec
        shape = (*dy.shape[:-1], spec.in_features)
        if dy.numel() == 0:
            return dy.new_empty(shape)
        if self._link._pretending.now:
            return dy.new_zeros(shape)
        rows = dy.reshape(-1, spec.out_features).as_subclass(torch.Tensor)
        tensors = (rows,) if x is None else (x.reshape(-1, spec.in_features).as_subclass(torch.Tensor), rows)
        if self._link.backward_began is not None:
            self._link.backward_began()
        (dx,) = self._link.request(self._keys[Pass.BACKWARD], Kind.FINETUNE, tensors, spec.name)
        return dx.view(shape)

    def multiply(self, x: torch.Tensor, forward: bool) -> torch.Tensor:
        """X·Wᵀ, [..., i] → [..., o], or with ``forward=False`` X·W, [..., o] → [..., i]; of a linear layer.

        For code that multiplies by the weight itself, in a forward pass or in the backward of its own function.
        """
        if self._link.backward_began is not None:
            self._link.backward_began()
        x = x.to(self.spec.dtype)
        if forward:
            return self._call(x, Pass.FORWARD_WITHOUT_BIAS if self.spec.bias else Pass.FORWARD)
        y = self._backward(x.detach(), None)
        return _wrap_backward(x, self, [y]) if x.requires_grad and torch.is_grad_enabled() else y

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtLayer:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo[id(self._link)] = self._link
        state = {name: value for name, value in self.__dict__.items() if name not in ("spec", "_siblings")}
        copied.__dict__.update(copy.deepcopy(state, memo), spec=self.spec, _siblings=None)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.spec.name} stands for a base layer of the executor and cannot be pickled; "
            "save the adapter instead (client.save_adapter)"
        )


class _Wrap(torch.autograd.Function):
    """An autograd node around a result that is there already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: VirtLayer, result: list[torch.Tensor]) -> torch.Tensor:
        ctx.layer = layer
        if not layer.spec.linear:
            ctx.save_for_backward(x)
        return result.pop()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        saved = ctx.saved_tensors
        return ctx.layer._backward(dy, saved[0] if saved else None), None, None


class _WrapBackward(torch.autograd.Function):
    """The same around X·W, a product that somebody made with the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: VirtLayer, result: list[torch.Tensor]) -> torch.Tensor:
        ctx.layer = layer
        return result.pop()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.layer.multiply(dy, forward=True), None, None


_Apply = Callable[[torch.Tensor, VirtLayer, list[torch.Tensor]], torch.Tensor]
_wrap = cast(_Apply, _Wrap.apply)
_wrap_backward = cast(_Apply, _WrapBackward.apply)


class _VirtLinear(VirtLayer):
    """What VirtLinear and VirtConv1D have in common: a placeholder weight, a shared bias."""

    weight: SharedParameter
    bias: SharedParameter | None

    def _fill(self, module: nn.Module, device: torch.device, tied: SharedParameter | None) -> None:
        """Make the parameters; ``tied`` is the client-side one that the weight is tied to (an lm_head's embedding)."""
        weight, bias = module.weight, module.bias
        assert isinstance(weight, torch.Tensor)
        if tied is None:
            tied = placeholder(weight.shape, self.spec.dtype, device, fetch_of(weight))
            introduce(tied, self)
        self.weight = tied
        self.register_parameter("bias", share(bias, device) if isinstance(bias, torch.Tensor) else None)

    def _pass(self) -> Pass:
        bias = self._parameters["bias"]  # self.bias takes nn.Module's slow road
        if bias is None or (type(bias) is SharedParameter and bias._fetch is not None):
            return Pass.FORWARD
        return Pass.FORWARD_WITHOUT_BIAS

    def _own_weight(self) -> torch.Tensor | None:
        """The weight, if the tenant has one of its own."""
        weight = self._parameters["weight"]
        return weight if getattr(weight, "_fetch", None) is None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtLayer:
        copied = super().__deepcopy__(memo)
        weight = copied._parameters["weight"]
        if isinstance(weight, SharedParameter) and weight.is_placeholder:
            introduce(weight, copied)
        return copied

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> _VirtLinear:
        """``.to(...)``: move the one number of the placeholder, not the matrix that it is expanded to."""
        weight = self.weight
        if not isinstance(weight, SharedParameter) or not weight.is_placeholder:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        self._parameters["weight"] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            weight.data = fn(values_of(weight)[(0,) * weight.ndim]).expand(weight.shape)
            self._parameters["weight"] = weight
        return self


class VirtLinear(_VirtLinear, nn.Linear):  # type: ignore[misc]
    """Stands for an ``nn.Linear``: [..., i] → [..., o]."""

    def __init__(
        self,
        module: nn.Linear,
        spec: LayerSpec,
        link: Link,
        device: torch.device,
        tied: SharedParameter | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.training = module.training
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self._attach(spec, link)
        self._fill(module, device, tied)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._own_weight()
        if weight is not None:
            return nn.functional.linear(x, weight, self.bias)
        pass_ = self._pass()
        y = self._call(x, pass_)
        return y if pass_ is Pass.FORWARD else y + cast(torch.Tensor, self.bias)


class VirtConv1D(_VirtLinear, Conv1D):  # type: ignore[misc]
    """Stands for a transformers ``Conv1D``: [..., i] → [..., o]."""

    def __init__(
        self, module: Conv1D, spec: LayerSpec, link: Link, device: torch.device, tied: SharedParameter | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.training = module.training
        self.nx, self.nf = spec.in_features, spec.out_features
        self._attach(spec, link)
        self._fill(module, device, tied)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._own_weight() is not None:
            return Conv1D.forward(self, x)  # type: ignore[no-any-return]
        pass_ = self._pass()
        y = self._call(x, pass_)
        return y if pass_ is Pass.FORWARD else y + cast(torch.Tensor, self.bias)


def _is_missing(parameter: nn.Parameter | None) -> bool:
    return isinstance(parameter, SharedParameter) and parameter.is_placeholder


class VirtModule(VirtLayer):
    """Stands for a module that is served whole, an MLP say, as long as the tenant has changed nothing inside it.

    With an adapter inside, a trainable weight or dropout that is in use, and for a client whose rows are masked, the
    module runs here and its own VirtLayers ask the executor. Made by :func:`virtualize` from the skeleton's module,
    whose class it extends.
    """

    def _watch_inside(self) -> None:
        self._inside = [
            (parent, name, child)
            for parent in self.modules()
            for name, child in parent._modules.items()
            if child is not None
        ]
        self._dropouts = [m for m in self.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]

    def _check_can_run_here(self) -> None:
        """Weights inside are the executor's, unless their layers are served for themselves, too."""
        for module in self.modules():
            if not isinstance(module, VirtLayer) and any(map(_is_missing, module._parameters.values())):
                why = "is not linear, so its rows cannot be masked" if self._link.private else "was changed here"
                raise (PrivacyError if self._link.private else PlaceholderError)(
                    f"{self.spec.name} is served whole and {why}, and the linear layers inside are not served; nothing "
                    "was sent. Ask for an executor with base_layers='linear' or 'mlp'"
                )

    def _is_untouched(self) -> bool:
        for parent, name, child in self._inside:
            if parent._modules.get(name) is not child:
                return False
            if isinstance(child, _VirtLinear) and (
                child._own_weight() is not None or child._pass() is not Pass.FORWARD
            ):
                return False
        return not (self.training and self._dropouts)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._link.private or args or kwargs or not self._is_untouched():
            self._check_can_run_here()
            return cast(torch.Tensor, super().forward(x, *args, **kwargs))
        return self._call(x)


def virtualize(module: nn.Module, spec: LayerSpec, link: Link) -> None:
    """Make a module of a client's skeleton, in place, the VirtModule of the same name and parameters."""
    cls = type(module)
    module.__class__ = type(f"Virt{cls.__name__}", (VirtModule, cls), {"__module__": __name__})
    assert isinstance(module, VirtModule)
    module._attach(spec, link)
    module._watch_inside()


@contextlib.contextmanager
def finetuning(model: nn.Module) -> Iterator[None]:
    """Meanwhile what the model asks for without gradients belongs to a training step, too."""
    links = {layer._link for layer in model.modules() if isinstance(layer, VirtLayer)}
    for link in links:
        link.finetuning = True
    try:
        yield
    finally:
        for link in links:
            link.finetuning = False


def rehearse(
    model: nn.Module, link: Link, training: bool, inputs: Mapping[str, Any], device: torch.device
) -> list[Key]:
    """What a walk of the model asks of its linear layers, with their backward passes or not.

    The model is walked once, without a request and without gradients, to see which layers are asked together. What it
    draws (dropout) is drawn from a copy of the stream of random numbers, which stays where it is.

    Args:
        inputs: of the model; if there are none, one token with id 0, on ``device``.
    """
    stream = RandomStream(device)
    stream.enter()
    try:
        with link.pretending(), torch.no_grad():
            model(**(inputs or {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device)}))
    finally:
        stream.leave()
    keys: dict[Key, None] = {}
    for layer in model.modules():
        if isinstance(layer, _VirtLinear):
            siblings, pass_ = layer._siblings, layer._pass()
            keys[layer._keys[pass_] if siblings is None else siblings.keys[pass_]] = None
            if training:
                keys[layer._keys[Pass.BACKWARD]] = None
    return list(keys)
