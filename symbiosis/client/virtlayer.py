"""VirtLayer: stands for a base layer in a client's model.

To ``transformers`` and PEFT a VirtLayer *is* the ``nn.Linear`` or ``Conv1D`` that it replaces. Its forward pass
sends the rows to the executor and waits for the result, and so does its backward pass (:mod:`symbiosis.client.waiting`
explains how).

Autograd: the result is computed first and wrapped in an autograd node afterwards, because a fiber cannot suspend inside
``autograd.Function.forward``. Siblings share the forward request, but each has a node of its own, made when the model
calls it. The engine then adds up gradients in the same order as in the plain model, so a client alone is bit-equal to
it. One node for all siblings would save two backward round trips, but results would no longer be bit-equal.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo
from transformers.pytorch_utils import Conv1D

from symbiosis.client.fibers import RandomStream
from symbiosis.client.parameters import SharedParameter, fetch_of, placeholder, shared_parameter, values_of
from symbiosis.client.placeholders import KeptProduct, Placeholder, introduce
from symbiosis.client.requester import ModelCopy, Requester, refuse_to_trace
from symbiosis.client.siblings import Member, Siblings
from symbiosis.core.requests import Key, LayerSpec, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import RequestError
from symbiosis.module_state import buffers_kept


class VirtLayer(nn.Module):
    """The behaviour that all VirtLayers have in common. ``spec`` is the layer's entry in the layer table."""

    spec: LayerSpec
    siblings: Siblings | None
    may_have_siblings: bool
    _requester: Requester
    _model: ModelCopy

    def _attach(self, spec: LayerSpec, requester: Requester) -> None:
        self.spec = spec
        self.siblings = None
        self.may_have_siblings = True
        self._requester = requester
        self._model = requester.model
        self._keys = {pass_: Key((spec.layer,), pass_) for pass_ in Pass}

    def _call(self, x: torch.Tensor, pass_: Pass = Pass.FORWARD) -> torch.Tensor:
        """Return the base layer's result for x, [..., i] → [..., o]. Its backward asks the executor again."""
        spec = self.spec
        shape = x.shape
        if shape[-1] != spec.in_features:
            raise RequestError(f"{spec.name}: input is {list(shape)}; its last dimension must be {spec.in_features}")
        autocast = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)
        if x.dtype is not spec.dtype:
            if not autocast or not x.is_floating_point():
                raise RequestError(
                    f"{spec.name}: input is {x.dtype}, but the base model is served in {spec.dtype}; cast the input, "
                    f"use torch.autocast, or, if the model was converted, convert it back with model.to({spec.dtype}); "
                    "a provider chooses with symbiosis serve --dtype"
                )
            x = x.to(spec.dtype)
        y: torch.Tensor | None = None
        here = self._requester.here
        if not x.numel():
            y = x.new_empty(0, spec.out_features)
        elif self.may_have_siblings and spec.linear and not x.is_inference():
            siblings = self.siblings  # which another thread may dissolve
            if siblings is None:
                here.siblings.watch(self, x, pass_)
            elif not here.rehearsing:
                y = here.siblings.result(self, siblings, x, pass_)
        if y is None and here.rehearsing:
            y = x.new_zeros(shape[:-1].numel(), spec.out_features)
        elif y is None:
            (y,) = self.request(self._keys[pass_], x)
        if x.requires_grad and torch.is_grad_enabled():
            # Not a view: torch forbids in-place operations on a view made here, and nn.Linear's output allows them.
            y = torch.ops.aten._unsafe_view(y, (*shape[:-1], spec.out_features))
            y = known(y, self._gradients, (x,), saved=not spec.linear)
        else:
            y = y.view(*shape[:-1], spec.out_features)
        return y.to(torch.get_autocast_dtype(x.device.type)) if autocast else y

    def is_in_model_of(self, other: Member) -> bool:
        return isinstance(other, VirtLayer) and self._model is other._model

    def join(self, group: Siblings) -> None:
        self.siblings = group

    def leave_for_good(self) -> None:
        self.siblings = None
        self.may_have_siblings = False

    @property
    def kept(self) -> KeptProduct:
        return self._requester.here.kept

    @property
    def rehearsing(self) -> bool:
        """Whether the calling thread gets zeros in place of the executor's answers."""
        return self._requester.here.rehearsing

    def request(self, key: Key, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send the rows of x, and return a result [n, o] for each layer of the key."""
        rows = (x.detach() if x.requires_grad else x).reshape(-1, self.spec.in_features)
        if type(rows) is not torch.Tensor:  # a subclass would take part in batches with other tenants' rows
            rows = rows.as_subclass(torch.Tensor)
        return self._requester.request(key, self._kind(x), (rows,), self.spec.name)

    def _kind(self, x: torch.Tensor) -> Kind:
        """Return the kind of a request with the rows x [..., i]."""
        requester = self._requester
        if torch.is_grad_enabled() or requester.finetuning or self.training:
            return Kind.FINETUNE
        return requester.kinds.kind_of(x)

    def _backward(self, dy: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        """Return dX for dY, [..., o] → [..., i]."""
        spec = self.spec
        shape = (*dy.shape[:-1], spec.in_features)
        if dy.numel() == 0:
            return dy.new_empty(shape)
        if self._requester.here.rehearsing:
            return dy.new_zeros(shape)
        rows = dy.reshape(-1, spec.out_features).as_subclass(torch.Tensor)
        tensors = (rows,) if x is None else (x.reshape(-1, spec.in_features).as_subclass(torch.Tensor), rows)
        self._requester.before_backward()
        (dx,) = self._requester.request(self._keys[Pass.BACKWARD], Kind.FINETUNE, tensors, spec.name)
        return dx.view(shape)

    def _gradients(self, dy: torch.Tensor, x: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        return (self._backward(dy, x),)

    def multiply(self, x: torch.Tensor, forward: bool) -> torch.Tensor:
        """Return X·Wᵀ, [..., i] → [..., o], or with ``forward=False`` X·W, [..., o] → [..., i]. Linear layers only.

        For code that multiplies by the weight instead of calling the layer. Rows of a wider dtype than the weight's are
        multiplied in fp32, as code does that converts the weight first.
        """
        self._requester.before_backward()
        if x.dtype.itemsize > self.spec.dtype.itemsize:
            x = x.float()
            y = self._multiply_wide(x.detach(), forward)
        else:
            x = x.to(self.spec.dtype)
            if forward:
                return self._call(x, Pass.FORWARD_WITHOUT_BIAS if self.spec.bias else Pass.FORWARD)
            y = self._backward(x.detach(), None)
        if x.requires_grad and torch.is_grad_enabled():
            y = known(y, lambda dy: (self.multiply(dy, not forward),), (x,), saved=False)
        return y

    def _multiply_wide(self, x: torch.Tensor, forward: bool) -> torch.Tensor:
        """Return a product in fp32 with a weight of a narrower dtype."""
        spec = self.spec
        before, after = (spec.in_features, spec.out_features)[:: 1 if forward else -1]
        if not x.numel() or self.rehearsing:
            return x.new_zeros(*x.shape[:-1], after)
        pass_ = Pass.BACKWARD if not forward else Pass.FORWARD_WITHOUT_BIAS if spec.bias else Pass.FORWARD
        key, rows = Key((spec.layer,), pass_, fp32=True), x.reshape(-1, before).as_subclass(torch.Tensor)
        (y,) = self._requester.request(key, self._kind(x), (rows,), spec.name)
        return y.view(*x.shape[:-1], after)

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtLayer:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo[id(self._requester)] = self._requester
        state = {name: value for name, value in self.__dict__.items() if name not in ("spec", "siblings")}
        copied.__dict__.update(copy.deepcopy(state, memo), spec=self.spec, siblings=None)
        return copied

    def __prepare_scriptable__(self) -> NoReturn:
        raise refuse_to_trace(self.spec.name)  # torch.jit.script asks for what it compiles in place of a module

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.spec.name} stands for a base layer of the executor and cannot be pickled; "
            "save the adapter instead (client.save_adapter)"
        )


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradients: Callable[..., Any], result: list[torch.Tensor], saved: bool, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        if saved:
            ctx.save_for_backward(*inputs)
        return result.pop()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *ctx.gradients(dy, *ctx.saved_tensors)


def known(
    result: torch.Tensor, gradients: Callable[..., Any], inputs: tuple[torch.Tensor, ...], *, saved: bool
) -> torch.Tensor:
    """Return a result that is known already, in an autograd node. ``gradients`` returns the gradients of the inputs, or
    None, given that of the result and, if they are ``saved``, the inputs.

    Backward passes that this thread begins will run on it on a GPU too. The engine has one thread per device for the
    process: a client that waits there for its executor would stop all others, and signals.
    """
    torch.autograd.set_multithreading_enabled(False)
    return cast(torch.Tensor, _Known.apply(gradients, [result], saved, *inputs))  # type: ignore[no-untyped-call]


class _VirtLinear(VirtLayer):
    """The behaviour that VirtLinear and VirtConv1D have in common: a placeholder weight, a shared bias."""

    weight: SharedParameter
    bias: SharedParameter | None
    _base_bias: SharedParameter | None
    """The bias that the executor adds, as long as it is the layer's bias and is shared."""
    _names_of_sizes: tuple[str, str]
    """Attributes with the numbers of features, input and output, in the class that this stands for."""

    def __init__(
        self,
        module: nn.Module,
        spec: LayerSpec,
        requester: Requester,
        device: torch.device,
        shared: dict[int, SharedParameter],
    ) -> None:
        """Stand for ``module``. ``shared`` has the parameters of the client's model that were made so far, by the id of
        the base model's; the weight and the bias can be among them, and are added."""
        nn.Module.__init__(self)
        self.training = module.training
        for name, size in zip(self._names_of_sizes, (spec.in_features, spec.out_features), strict=True):
            setattr(self, name, size)
        self._attach(spec, requester)
        weight, bias = module.weight, module.bias
        assert isinstance(weight, torch.Tensor)
        if id(weight) not in shared:
            shape = (spec.in_features, spec.out_features) if isinstance(module, Conv1D) else (spec[3], spec[2])
            shared[id(weight)] = placeholder(shape, spec.dtype, device, fetch_of(weight, spec.name))
            introduce(shared[id(weight)], self)
        self.weight = shared[id(weight)]
        self._tied = not isinstance(self.weight, Placeholder)  # to an embedding, as lm_head's weight is
        if isinstance(bias, torch.Tensor) and id(bias) not in shared:
            shared[id(bias)] = shared_parameter(bias, device)
        self.register_parameter("bias", shared.get(id(bias)))
        object.__setattr__(self, "_base_bias", self.bias)  # a module would register it as a further parameter

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        present = self._parameters.get(name)
        if isinstance(present, Placeholder) and param is not None:
            present.refuse_another(param)
        super().register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_compiled():
            return uncompiled(self, x)
        if self._own_weight() is not None:
            return super().forward(x)  # type: ignore[no-any-return]
        pass_ = self._pass()
        if pass_ is Pass.FORWARD and self._rounds_twice(x):
            pass_ = Pass.FORWARD_WITHOUT_BIAS
        y = self._call(x, pass_)
        if pass_ is not Pass.FORWARD and (bias := self.bias) is not None:
            y = (y + cast(torch.Tensor, bias)).to(y.dtype)  # the bias may be wider
        return y

    def _rounds_twice(self, x: torch.Tensor) -> bool:
        """Return whether the plain layer rounds the product of x [..., i] before it adds the bias."""
        return False

    def _pass(self) -> Pass:
        own = self._parameters  # self.bias would go through nn.Module.__getattr__
        bias = own.get("bias")
        if bias is None and "bias" in own and not self.spec.bias:
            return Pass.FORWARD
        if type(bias) is SharedParameter and not bias.own and bias is self._base_bias:
            return Pass.FORWARD
        return Pass.FORWARD_WITHOUT_BIAS  # the tenant has changed it, has removed it, or computes it from others

    def _own_weight(self) -> torch.Tensor | None:
        """Return the weight if the tenant has one of its own, otherwise None."""
        weight = self._parameters.get("weight")
        if weight is None:  # a parametrization computes it, as PEFT's target_parameters does
            return self.weight
        if isinstance(weight, Placeholder):
            return None
        # One that is shared, but is not this layer's, was assigned by the tenant, for example by model.tie_weights().
        return None if self._tied and isinstance(weight, SharedParameter) and not weight.own else weight

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtLayer:
        copied = super().__deepcopy__(memo)
        weight = copied._parameters.get("weight")
        if isinstance(weight, SharedParameter) and weight.is_placeholder:
            introduce(weight, copied)
        return copied

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> _VirtLinear:
        """Move (``.to(...)``) the one number of the placeholder, not the matrix that it is expanded to."""
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

    _names_of_sizes = ("in_features", "out_features")

    def _rounds_twice(self, x: torch.Tensor) -> bool:
        # torch adds the bias inside the product only if x has two dimensions or is contiguous.
        return x.ndim > 2 and self._parameters.get("bias") is not None and not x.is_contiguous()


class VirtConv1D(_VirtLinear, Conv1D):  # type: ignore[misc]
    """Stands for a transformers ``Conv1D``: [..., i] → [..., o]."""

    _names_of_sizes = ("nx", "nf")


def is_compiled() -> bool:
    """Return whether the caller's code is being compiled or exported. ``torch.compiler.is_compiling`` is True on all
    threads while one of them compiles."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


@_disable_dynamo  # torch.compiler.disable would import the compiler here, which takes a second
def uncompiled(layer: VirtLayer, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a layer outside compiled code: the compiler splits the graph before and after this call.

    The compiler looks at the frames of whatever its thread runs, until a disabled function is called. A fiber that
    waited inside compiled code would have it compile the executor and other clients.
    """
    if torch.compiler.is_exporting():
        raise refuse_to_trace(layer.spec.name)
    return cast(torch.Tensor, layer.forward(*args, **kwargs))


def is_missing(parameter: nn.Parameter | None) -> bool:
    """Return whether a parameter is a placeholder, whose values the client does not have."""
    return isinstance(parameter, SharedParameter) and parameter.is_placeholder


@contextlib.contextmanager
def in_training_step(model: nn.Module) -> Iterator[None]:
    """Treat forward passes that run without gradients inside the ``with`` block as parts of a training step."""
    with contextlib.ExitStack() as stack:
        for requester in {layer._requester for layer in model.modules() if isinstance(layer, VirtLayer)}:
            stack.enter_context(requester.in_training_step())
        yield


def rehearse(
    model: nn.Module, requester: Requester, training: bool, inputs: Mapping[str, Any], device: torch.device
) -> list[Key]:
    """Return the keys that the model's linear layers ask for.

    The model is walked once, without a request and without gradients, to see which layers are asked together. Random
    numbers are drawn from a copy of the client's stream, and buffers, such as those of batch norms, are as before.

    Args:
        model: the client's model.
        requester: the requester of its VirtLayers.
        training: whether to include backward passes.
        inputs: arguments of the model; if there are none, one token with id 0.
        device: device of that token.
    """
    with RandomStream(device), requester.rehearsing(), torch.no_grad(), buffers_kept(model):
        model(**(inputs or {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device)}))
    keys: dict[Key, None] = {}
    for layer in model.modules():
        if isinstance(layer, _VirtLinear):
            siblings, pass_ = layer.siblings, layer._pass()
            keys[layer._keys[pass_] if siblings is None else siblings.key(pass_)] = None
            if training:
                keys[layer._keys[Pass.BACKWARD]] = None
    return list(keys)
