"""A masked channel without an executor process, for the tests of privacy schemes at the level of rows.

Results are compared with products of the bare rows in fp64. The stated accuracy: the error, relative to the size of
such products (‖x‖·rms(W)), is at most 1.5e-6 · scale in fp32, plus one rounding where the layer is narrower.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from symbiosis.core.requests import Call, Key, LayerSpec, Pass, expected
from symbiosis.core.share import Share
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Check, Identity
from symbiosis.errors import ExecutorClosedError
from symbiosis.executor.fingerprint import weights_fingerprint
from symbiosis.executor.layers import BaseLayer, base_layer
from symbiosis.modes import modes_aside
from symbiosis.privacy import LocalPads, MaskedChannel, NoisePool, SecretShares
from symbiosis.privacy.amplitude import error_per_scale
from symbiosis.privacy.masks import MaskedKey, MaskedRows
from symbiosis.privacy.scheme import Scheme

FORWARD = Key((0,), Pass.FORWARD)


class Direct:
    """A channel for synchronous code whose executor is a function call. It keeps the calls that it was sent."""

    client = "test"
    device = torch.device("cpu")
    share = Share({}, {}, {})

    def __init__(self, model: nn.Module, instance: str = "one") -> None:
        self.table: list[BaseLayer] = [
            base_layer(index, name, module) for index, (name, module) in enumerate(model.named_children())
        ]
        self.layers: list[LayerSpec] = [layer.spec for layer in self.table]
        self.instance = instance
        self.seen: list[Call] = []
        self.fails: Callable[[Call], bool] = lambda call: False
        self.checks: list[Check] = []

    def before_return(self, check: Check) -> None:
        self.checks.append(check)

    def reconnect(self, instance: str) -> None:
        """Find another executor at the address, like a transport whose executor was replaced."""
        for check in self.checks:
            check(self.identity()._replace(instance=instance))
        self.instance = instance

    def identity(self) -> Identity:
        return Identity(self.instance, weights_fingerprint([(layer.spec, layer.module) for layer in self.table]))

    def call(self, call: Call) -> tuple[torch.Tensor, ...]:
        due = expected(self.layers, call.key)
        assert [tensor.shape[1] for tensor in call.tensors] == [width for width, _ in due.call]
        assert [tensor.dtype for tensor in call.tensors] == [dtype for _, dtype in due.call]
        assert not any(tensor.requires_grad for tensor in call.tensors)
        self.seen.append(Call(call.key, call.kind, tuple(tensor.clone() for tensor in call.tensors)))
        if self.fails(call):
            raise ExecutorClosedError("gone")
        with modes_aside(), torch.no_grad():  # an executor does not share a tenant's torch modes
            return tuple(y for layer in call.key.layers for y in self.table[layer].run(call.key, call.tensors))

    def interrupt(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


class Layers(nn.Module):
    """Three linear layers that read the same rows: with a bias, without one, and a Conv1D."""

    def __init__(self, width: int = 24, out: int = 40, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(width, out)
            self.second = nn.Linear(width, 2 * out, bias=False)
            self.third = Conv1D(out, width)
            self.third.weight.data.normal_(0, 0.3)
            self.third.bias.data.normal_()
        self.requires_grad_(False).to(dtype)
        self.config = PreTrainedConfig(vocab_size=out)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        """Wait until typical sizes were measured."""
        waves = torch.arange(1, self.first.in_features + 1) * input_ids[..., None]
        x = waves.sin().to(self.first.weight.dtype)
        return (self.first(x) + self.second(x)[..., : self.first.out_features] + self.third(x),)


SCHEMES: dict[str, Callable[..., Scheme]] = {
    "noise-pool": lambda model, **options: NoisePool(**{"size": 3, "refresh": 4, **options}),
    "local-pads": lambda model, **options: LocalPads(model, **{"rows": 3, **options}),
    "secret-shares": lambda model, **options: SecretShares("b", **options),
    "wrapped-shares": lambda model, **options: SecretShares("b", model=model, **options),
}
WRAPPED = ("local-pads", "wrapped-shares")
all_schemes = pytest.mark.parametrize("name", SCHEMES)


class Masking:
    """A masked channel over direct channels: one of them, or two for shares."""

    def __init__(self, scheme: Scheme, model: nn.Module, other: nn.Module | None = None) -> None:
        self.channels = [Direct(model, f"executor {n}") for n in range(2 if scheme.name == "secret-shares" else 1)]
        if other is not None:
            self.channels[1] = Direct(other, "another")
        self.channel = MaskedChannel(self.channels, scheme.begin)  # type: ignore[arg-type]
        self.mask: Any = self.channel.mask
        self.amplitudes: list[float] = []
        """Amplitude of each request."""
        mask = self.mask.mask

        def recorded(key: MaskedKey, x: torch.Tensor, amplitude: float, kind: Kind) -> MaskedRows:
            self.amplitudes.append(amplitude)
            made: MaskedRows = mask(key, x, amplitude, kind)
            return made

        self.mask.mask = recorded

    def __enter__(self) -> Masking:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def ask(self, layers: tuple[int, ...], pass_: Pass, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.channel.call(Call(Key(layers, pass_), Kind.DECODE, (x,)))

    def assert_forward(self, x: torch.Tensor, layer: int = 0, scale: float = 256.0) -> None:
        """Request a forward pass of one layer, and check the accuracy of its result."""
        (y,) = self.ask((layer,), Pass.FORWARD, x)
        self.assert_accurate(y, x, layer, scale=scale)

    def assert_accurate(
        self,
        result: torch.Tensor,
        x: torch.Tensor,
        layer: int = 0,
        pass_: Pass = Pass.FORWARD,
        scale: float = 256.0,
        largest: float = 0.0,
    ) -> None:
        """``largest``: norm of the largest earlier row, for which the amplitude may still be made."""
        wanted = self.exact(x, layer, pass_)
        size = max(x.double().norm(dim=1).amax().item(), largest) * self.weight_rms(layer) * math.sqrt(wanted.numel())
        error = (result.double() - wanted).norm()
        work = torch.float64 if result.dtype is torch.float64 else torch.float32
        # Rounding of the result itself, and of a sum that begins with the bias and then adds each term.
        rounding = wanted.norm() * (2 * torch.finfo(result.dtype).eps + math.sqrt(x.shape[1]) * torch.finfo(work).eps)
        rounding += math.sqrt(wanted.numel()) * torch.finfo(result.dtype).tiny * torch.finfo(result.dtype).eps
        unit = error_per_scale(x.shape[1], result.dtype)
        assert error <= (scale + 1) * unit * size + rounding, (error / size, scale * unit)

    def exact(self, x: torch.Tensor, layer: int = 0, pass_: Pass = Pass.FORWARD) -> torch.Tensor:
        """Return the result for bare rows in fp64."""
        module: Any = self.channels[0].table[layer].module
        weight = module.weight.double().t() if isinstance(module, Conv1D) else module.weight.double()
        if pass_ is Pass.BACKWARD:
            return x.double() @ weight
        bias = module.bias if pass_ is Pass.FORWARD else None
        return x.double() @ weight.t() + (0 if bias is None else bias.double())

    def weight_rms(self, layer: int) -> float:
        weight: Any = self.channels[0].table[layer].module.weight
        return weight.double().square().mean().sqrt().item()

    def masked(self, number: int = 0) -> list[torch.Tensor]:
        """Return the masked rows that one executor received, for noise pools, without noise vectors."""
        return [
            call.tensors[0]
            for call in self.channels[number].seen
            if call.key.pass_ is not Pass.FORWARD_WITHOUT_BIAS or len(self.channels) > 1
        ]

    def vectors(self) -> list[torch.Tensor]:
        """Return the noise vectors that were sent for their effects."""
        return [c.tensors[0] for c in self.channels[0].seen if c.key.pass_ is Pass.FORWARD_WITHOUT_BIAS]

    def prepare(self, key: Key = FORWARD) -> None:
        """Wait until the mask is prepared for a key."""
        future: Future[Any] = self.mask.prepare(self.channel.masked_key(key))
        future.result(10)

    def pads(self, x: torch.Tensor) -> torch.Tensor:
        """Return the pads as integers, from the rows x that each request had."""
        (amplitude,) = set(self.amplitudes)
        step = amplitude * 2.0**-23
        sent = torch.cat(self.masked())
        bare = (x / step).round().repeat(len(sent) // len(x), 1)
        return ((sent / step - bare).long() + (1 << 23)) % (1 << 24) - (1 << 23)


def normal_rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_all_different(rows: torch.Tensor) -> None:
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)


def assert_uniform(values: torch.Tensor, bins: int, low: float, high: float) -> None:
    """Check the histogram of values by a chi-square test at five standard deviations."""
    counts = torch.histc(values, bins, low, high)
    chi = ((counts - counts.mean()).square() / counts.mean()).sum()
    assert abs(chi - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


def ask_on_thread(masking: Masking, x: torch.Tensor) -> torch.Tensor | None:
    """Return the result of a request that another thread makes, or None if it does not end."""
    answers: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: answers.extend(masking.ask((0,), Pass.FORWARD, x)), daemon=True)
    thread.start()
    thread.join(300)
    return answers[0] if answers else None
