"""Privacy schemes at the level of rows: what comes back, what goes out, how often noise is used, what is refused.

Results are compared with products in fp64 of the bare rows. Stated accuracy: the error, relative to the size that such
products have (‖x‖·rms(W)), is at most 1.5e-6 · scale in fp32, and one rounding more where the layer is narrower.
"""

from __future__ import annotations

import asyncio
import errno
import linecache
import math
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from symbiosis.core.registry import make_privacy
from symbiosis.core.requests import Call, Key, LayerSpec, Pass, expected
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Check, Identity
from symbiosis.errors import ExecutorClosedError, PrivacyError, UnknownNameError, UsageError
from symbiosis.executor.fingerprint import weights_fingerprint
from symbiosis.executor.layers import BaseLayer, base_layer
from symbiosis.modes import modes_aside
from symbiosis.privacy import LocalPads, MaskedChannel, MixedNoise, NoisePool, SecretShares, keystream, local_pads
from symbiosis.privacy.amplitude import Levels, error_per_scale, size_of
from symbiosis.privacy.cycle import Cycle
from symbiosis.privacy.keystream import BITS, Keystream
from symbiosis.privacy.masks import Asked, Masked
from symbiosis.privacy.own_weights import OwnWeights
from symbiosis.privacy.pad_folder import _HEAD, PadFolder
from symbiosis.privacy.pad_folder import Counter as PadCounter
from symbiosis.privacy.scheme import Scheme
from symbiosis.privacy.usual import Usual
from symbiosis.privacy.wrapped import wrap


class Direct:
    """A channel for synchronous code whose executor is a function call. It keeps what it was sent."""

    client = "test"
    device = torch.device("cpu")

    def __init__(self, model: nn.Module, instance: str = "one") -> None:
        self.table: list[BaseLayer] = [
            base_layer(index, name, module) for index, (name, module) in enumerate(model.named_children())
        ]
        self.layers: list[LayerSpec] = [layer.spec for layer in self.table]
        self.instance = instance
        self.seen: list[Call] = []
        self.fails: Callable[[Call], bool] = lambda call: False
        self.closed = False
        self.checks: list[Check] = []

    def before_return(self, check: Check) -> None:
        self.checks.append(check)

    def comes_back_as(self, instance: str) -> None:
        """As a transport does it that has lost an executor."""
        for check in self.checks:
            check(self.identity()._replace(instance=instance))
        self.instance = instance

    def identity(self) -> Identity:
        return Identity(self.instance, weights_fingerprint([(layer.spec, layer.module) for layer in self.table]))

    def call(self, call: Call) -> tuple[torch.Tensor, ...]:
        widths, dtype, _ = expected(self.layers, call.key)
        assert [tensor.shape[1] for tensor in call.tensors] == list(widths)
        assert all(tensor.dtype is dtype and not tensor.requires_grad for tensor in call.tensors)
        self.seen.append(Call(call.key, call.kind, tuple(tensor.clone() for tensor in call.tensors)))
        if self.fails(call):
            raise ExecutorClosedError("gone")
        with modes_aside(), torch.no_grad():  # an executor does not know of a tenant's modes
            return tuple(self.table[layer].run(call.key.pass_, call.tensors) for layer in call.key.layers)

    def interrupt(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Layers(nn.Module):
    """Linear layers that read the same rows: with and without a bias, and of GPT-2's kind."""

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
        """So that it can be walked."""
        waves = torch.arange(1, self.first.in_features + 1) * input_ids[..., None]
        x = waves.sin().to(self.first.weight.dtype)
        return (self.first(x) + self.second(x)[..., : self.first.out_features] + self.third(x),)


class Mlp(nn.Sequential):
    """Not linear."""


SCHEMES: dict[str, Callable[..., Scheme]] = {
    "noise-pool": lambda model, **options: NoisePool(**{"size": 3, "refresh": 4, **options}),
    "mixed-noise": lambda model, **options: MixedNoise(**{"rank": 5, **options}),
    "local-pads": lambda model, **options: LocalPads(model, **{"rows": 3, **options}),
    "secret-shares": lambda model, **options: SecretShares(["a", "b"], **options),
    "wrapped-shares": lambda model, **options: SecretShares(["a", "b"], model=model, **options),
}
ALL = pytest.mark.parametrize("name", SCHEMES)
WRAPPED = ("local-pads", "wrapped-shares")


class Masking:
    """A masked channel and what lies behind it."""

    def __init__(self, scheme: Scheme, model: nn.Module, others: nn.Module | None = None) -> None:
        self.channels = [Direct(model, f"executor {n}") for n in range(2 if scheme.name == "secret-shares" else 1)]
        if others is not None:
            self.channels[1] = Direct(others, "another")
        self.scheme = scheme
        self.channel = MaskedChannel(self.channels, scheme.begin)  # type: ignore[arg-type]
        self.amplitudes: list[float] = []
        """Of all requests."""
        mask = self.channel.mask.mask

        def noted(asked: Asked, x: torch.Tensor, amplitude: float, kind: Kind) -> Masked:
            self.amplitudes.append(amplitude)
            return mask(asked, x, amplitude, kind)

        self.channel.mask.mask = noted  # type: ignore[method-assign]

    def __enter__(self) -> Masking:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def ask(self, layers: tuple[int, ...], pass_: Pass, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.channel.call(Call(Key(layers, pass_), Kind.DECODE, (x,)))

    def masked(self, number: int = 0) -> list[torch.Tensor]:
        """The rows that went to an executor, but for those of the scheme's own."""
        effects = self.scheme.name in ("noise-pool", "mixed-noise")
        return [
            call.tensors[0]
            for call in self.channels[number].seen
            if not effects or call.key.pass_ in (Pass.FORWARD, Pass.FORWARD_FP32)
        ]


def reference(layer: BaseLayer, pass_: Pass, x: torch.Tensor) -> torch.Tensor:
    """In fp64."""
    weight: Any = layer.module.weight
    weight = weight.double().t() if isinstance(layer.module, Conv1D) else weight.double()
    if pass_ is Pass.BACKWARD:
        return x.double() @ weight
    bias: Any = layer.module.bias if pass_ is Pass.FORWARD else None
    return x.double() @ weight.t() + (0 if bias is None else bias.double())


def assert_accurate(
    result: torch.Tensor, layer: BaseLayer, pass_: Pass, x: torch.Tensor, scale: float, largest: float = 0.0
) -> None:
    """``largest``: norm of the largest row before, for which the amplitude may still be made."""
    wanted = reference(layer, pass_, x)
    weight: Any = layer.module.weight
    rows = x.shape[0]
    size = (
        max(x.double().norm(dim=1).amax().item(), largest)
        * weight.double().square().mean().sqrt()
        * math.sqrt(rows * wanted.shape[1])
    )
    error = (result.double() - wanted).norm()
    work = torch.float64 if result.dtype is torch.float64 else torch.float32
    # Of the result itself, and of a sum that begins with the bias and goes on, term after term, at its size.
    rounding = wanted.norm() * (2 * torch.finfo(result.dtype).eps + math.sqrt(x.shape[1]) * torch.finfo(work).eps)
    rounding += math.sqrt(wanted.numel()) * torch.finfo(result.dtype).tiny * torch.finfo(result.dtype).eps  # subnormal
    unit = error_per_scale(x.shape[1], result.dtype)
    assert error <= (scale + 1) * unit * size + rounding, (error / size, scale * unit)


# ------------------------------------------------------------------------------------------------------------ results


@ALL
@settings(max_examples=25)
@given(data=st.data())
def test_results_are_those_of_the_bare_rows(name: str, data: st.DataObject) -> None:
    width, out = data.draw(st.sampled_from([(1, 1), (3, 7), (24, 40), (130, 65), (257, 512)]), "sizes")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), "dtype")
    scale = data.draw(st.sampled_from([1.0, 7.0, 64.0, 256.0, 2.0**14]), "scale")
    magnitude = data.draw(st.sampled_from([1e-4, 1.0, 30.0]), "magnitude")
    rows = data.draw(st.integers(1, 9), "rows")
    layers = data.draw(st.sampled_from([(0,), (1,), (2,), (0, 2), (0, 1, 2)]), "layers")
    seed = data.draw(st.integers(0, 1 << 30), "seed")
    model = Layers(width, out, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    with Masking(SCHEMES[name](model, scale=scale), model) as masking:
        for pass_ in (Pass.FORWARD, Pass.FORWARD_WITHOUT_BIAS, Pass.BACKWARD):
            asked = layers if pass_ is not Pass.BACKWARD else layers[:1]
            largest = 0.0
            for _ in range(3):
                columns = masking.channels[0].layers[asked[0]].out_features if pass_ is Pass.BACKWARD else width
                x = (torch.randn(rows, columns, generator=generator) * magnitude).to(dtype)
                results = masking.ask(asked, pass_, x)
                assert len(results) == len(asked)
                for index, result in zip(asked, results, strict=True):
                    assert result.dtype is dtype
                    assert_accurate(result, masking.channels[0].table[index], pass_, x, scale, largest)
                largest = max(largest, x.double().norm(dim=1).amax().item())


@ALL
def test_rows_of_many_sizes_in_one_request(name: str) -> None:
    """Some of the rows are far smaller, one is zero, one has a single huge number, as activations of models do."""
    model = Layers(256, 64)
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    x[1] *= 1e-3
    x[2] = 0
    x[3, 17] = 500.0
    with Masking(SCHEMES[name](model), model) as masking:
        (y,) = masking.ask((0,), Pass.FORWARD, x)
        assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)


@ALL
@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-30, 1e-12, 1e15])
def test_rows_near_the_ends_of_the_range(name: str, magnitude: float) -> None:
    model = Layers()
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(1)) * magnitude
    with Masking(SCHEMES[name](model), model) as masking:
        (y,) = masking.ask((1,), Pass.FORWARD, x)
        assert y.isfinite().all()
        if magnitude > 1e-20:
            assert_accurate(y, masking.channels[0].table[1], Pass.FORWARD, x, 256)
        else:  # noise has a least size, so as not to vanish itself
            assert y.abs().max() < 1e-20 or magnitude == 0.0
        assert all(rows.count_nonzero() > 0.9 * rows.numel() for rows in masking.masked())


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_rows_that_are_not_finite(name: str, bad: float) -> None:
    """They are not sent; their results are NaN, as a loss scaler expects, and the others' are right."""
    model = Layers()
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    x[1, 5] = bad
    with Masking(SCHEMES[name](model), model) as masking:
        y, z = masking.ask((0, 1), Pass.FORWARD, x)
        for number in range(len(masking.channels)):
            assert all(rows.isfinite().all() for rows in masking.masked(number))
        assert y[1].isnan().all()
        assert z[1].isnan().all()
        good = [0, 2]
        assert_accurate(y[good], masking.channels[0].table[0], Pass.FORWARD, x[good], 256)
        (dx,) = masking.ask((0,), Pass.BACKWARD, torch.full((1, 40), bad))
        assert dx.isnan().all()


@ALL
def test_the_tenants_own_random_numbers_stay_as_they_are(name: str) -> None:
    model = Layers()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with Masking(SCHEMES[name](model), model) as masking:
        masking.ask((0,), Pass.FORWARD, torch.ones(2, 24))
    assert torch.equal(torch.rand(3), wanted)


@ALL
def test_torchs_modes_are_the_tenants(name: str) -> None:
    """Autocast would compute masks in bf16; rows that were made in inference mode mask and unmask all the same."""
    model = Layers()
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(1))
    with Masking(SCHEMES[name](model), model) as masking:
        for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.enable_grad()):
            with mode:
                rows = x.clone()
                masking.ask((1,), Pass.FORWARD, rows)  # the first time makes noise, too
                masked, finish = masking.channel._masked(Call(Key((1,), Pass.FORWARD), Kind.DECODE, (rows,)))
            for wait in masked.waits:
                wait.result(10)
            answers = [c.call(part) for c, part in zip(masking.channels, masked.calls, strict=True)]
            with torch.autocast("cpu", torch.bfloat16):
                (y,) = finish(answers)
            assert_accurate(y, masking.channels[0].table[1], Pass.FORWARD, x, 256)


@ALL
def test_threads_share_a_channel(name: str) -> None:
    model = Layers()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(20):
                x = torch.randn(2, 24, generator=generator)
                (y,) = masking.ask((0,), Pass.FORWARD, x)
                assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)
        except BaseException as error:  # noqa: BLE001 (shown below)
            failures.append(error)

    with Masking(SCHEMES[name](model), model) as masking:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures, failures


@ALL
@settings(max_examples=40)
@given(data=st.data())
def test_accuracy_is_kept(name: str, data: st.DataObject) -> None:
    """``accuracy=`` is the error that comes out at most, relative to what the largest row of the request comes to;
    after larger rows, to what those came to, or 16 times this request's, whichever is less; or never more than this
    request's, where the weights are at hand."""
    dtype, accuracy = data.draw(
        st.sampled_from([(torch.float32, 1e-5), (torch.float32, 1e-4), (torch.float32, 1e-2), (torch.float64, 1e-9)])
    )
    width = data.draw(st.sampled_from([16, 100, 512]), "width")
    seed = data.draw(st.integers(0, 1 << 30), "seed")
    sizes = data.draw(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), min_size=1, max_size=5), "sizes")
    model = Layers(width, 256, dtype)
    generator = torch.Generator().manual_seed(seed)
    before = 0.0
    with Masking(SCHEMES[name](model, accuracy=accuracy), model) as masking:
        weight: Any = masking.channels[0].table[1].module.weight
        for exponents in sizes:
            x = torch.randn(len(exponents), width, dtype=dtype, generator=generator)
            x *= torch.tensor([10.0**exponent for exponent in exponents], dtype=dtype)[:, None]
            x[0, 0] *= data.draw(st.sampled_from([1.0, 100.0]), "outlier")
            (y,) = masking.ask((1,), Pass.FORWARD, x)
            error = (y.double() - reference(masking.channels[0].table[1], Pass.FORWARD, x)).square().mean(dim=1).sqrt()
            largest = x.double().norm(dim=1).amax().item()
            size = largest if name in WRAPPED else min(16 * largest, max(largest, before))
            assert error.max() <= accuracy * size * weight.double().square().mean().sqrt()
            before = max(before, largest)


@ALL
@pytest.mark.parametrize("width", [16_384, 53_248])
def test_accuracy_is_kept_by_wide_layers(name: str, width: int) -> None:
    model = Layers(width, 16)
    generator = torch.Generator().manual_seed(1)
    with Masking(SCHEMES[name](model, accuracy=1e-3), model) as masking:
        weight: Any = masking.channels[0].table[1].module.weight
        for rows in (1, 4, 20):
            x = torch.randn(rows, width, generator=generator)
            (y,) = masking.ask((1,), Pass.FORWARD, x)
            error = (y.double() - reference(masking.channels[0].table[1], Pass.FORWARD, x)).square().mean(dim=1).sqrt()
            size = x.double().norm(dim=1).amax() * weight.double().square().mean().sqrt()
            assert 1e-5 * size < error.max() <= 1e-3 * size  # as much as that it may be, to hide the more


def test_accuracy_depends_on_what_rows_are_in() -> None:
    """In fp64 it can be far better; in fp32 it is refused, when it is known that rows are."""
    assert NoisePool(accuracy=1e-4).levels_at(Direct(Layers())).least == pytest.approx(1e-4 / 1.5e-6)  # type: ignore[arg-type]
    fine = LocalPads(Layers(dtype=torch.float64), accuracy=1e-9)
    with Masking(fine, Layers(dtype=torch.float64)):
        pass
    with pytest.raises(
        PrivacyError,
        match=r"accuracy=1e-09 leaves no room for noise; with rows in fp32, up to 80 columns wide, 1.5e-06",
    ):
        Masking(LocalPads(Layers(), accuracy=1e-9), Layers())
    assert repr(fine).endswith("accuracy=1e-09")


# ------------------------------------------------------------------------------------------------------ what goes out


@ALL
def test_nothing_bare_goes_out(name: str) -> None:
    """No row that was sent is near a true row: correlations are those of chance, in the size that the noise allows."""
    model = Layers(512, 64)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    with Masking(SCHEMES[name](model, **({"rank": 512} if name == "mixed-noise" else {})), model) as masking:
        for row in x:
            masking.ask((1,), Pass.FORWARD, row[None])
        for channel in masking.channels:
            for call in channel.seen:
                for sent in call.tensors[0]:
                    cosine = (x @ sent) / (x.norm(dim=1) * sent.norm())
                    assert cosine.abs().max() < 6 / math.sqrt(512)


@ALL
def test_amplitudes_are_powers_of_two(name: str) -> None:
    """So no more than the size of a request shows, to a factor of two; and with the weights at hand, of 16."""
    model = Layers(64, 64)
    for magnitude in (0.9, 1.1, 3.0):
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
        x *= magnitude / x.square().mean().sqrt()
        with Masking(SCHEMES[name](model, scale=100), model) as masking:
            masked, _ = masking.channel._masked(Call(Key((1,), Pass.FORWARD), Kind.DECODE, (x,)))
            (amplitude,) = masking.amplitudes
            assert math.log2(amplitude).is_integer()
            if name in WRAPPED:
                assert 100 / 16 * magnitude <= amplitude <= 200 * magnitude
            else:
                assert amplitude == 2.0 ** math.ceil(math.log2(100 * magnitude))
            for wait in masked.waits:
                wait.result(10)
            bound = {"mixed-noise": 5, "secret-shares": 4}.get(name, 1.1)
            for call in masked.calls:
                assert call.tensors[0].abs().max() < bound * amplitude


def test_pads_leave_nothing_of_the_rows() -> None:
    """What goes out is uniform on its grid whatever x is, and tells nothing about x: here x is at the very edge."""
    model = Layers(64, 8)
    with Masking(LocalPads(model, rows=200, scale=1), model) as masking:
        edge = torch.ones(400, 64) * 0.999
        masking.ask((1,), Pass.FORWARD, edge)
        (sent,) = masking.masked()
        (amplitude,) = masking.amplitudes
    units = sent.double() / amplitude * 2**23
    assert torch.equal(units, units.round())
    assert units.min() >= -(2**23)
    assert units.max() < 2**23
    counts = torch.histc(units, 64, -(2**23), 2**23)
    chi = ((counts - counts.mean()).square() / counts.mean()).sum()
    assert abs(chi - 63) < 5 * math.sqrt(2 * 63)  # 63 degrees of freedom
    low = torch.bincount((units.long() & 15).flatten(), minlength=16).double()
    assert ((low - low.mean()).square() / low.mean()).sum() < 15 + 5 * math.sqrt(30)


def test_shares_add_up_to_the_row_and_show_nothing_of_its_last_bits() -> None:
    """Gaussian ones, each half a row with noise, of which the last bits are noise."""
    model = Layers(64, 8)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    with Masking(SecretShares(["a", "b"]), model) as masking:
        masking.ask((1,), Pass.FORWARD, x)
        (first,), (second,) = masking.masked(0), masking.masked(1)
    amplitude = size_of(x, 256).amplitude
    step = amplitude * 2.0**-21
    assert torch.equal(first + second, (x / step).round() * step)  # exactly
    for share in (first, second):
        units = (share / step).double()
        assert torch.equal(units, units.round())
        low = torch.bincount((units.long() & 15).flatten(), minlength=16).double()
        assert ((low - low.mean()).square() / low.mean()).sum() < 15 + 5 * math.sqrt(30)
        unit = (share - x / 2).double() / amplitude * math.sqrt(3)
        assert abs(unit.mean()) < 5 / math.sqrt(3200)
        assert abs(unit.square().mean() - 1) < 5 * math.sqrt(2 / 3200)
        assert abs(unit.pow(4).mean() - 3) < 5 * math.sqrt(96 / 3200)  # uniform: 1.8


def test_shares_of_who_has_the_weights_leave_nothing_of_the_rows() -> None:
    """Each is uniform on its grid, and results are right, although some numbers are wrapped: as many as they should."""
    model = Layers(64, 8)
    edge = torch.ones(400, 64) * 0.999
    with Masking(SecretShares(["a", "b"], model=model, scale=16), model) as masking:
        (y,) = masking.ask((1,), Pass.FORWARD, edge)
        assert_accurate(y, masking.channels[0].table[1], Pass.FORWARD, edge, 16)
        (first,), (second,) = masking.masked(0), masking.masked(1)
        (amplitude,) = masking.amplitudes
    total = (first.double() + second.double() - edge.double()) / (2 * amplitude)
    assert (total - total.round()).abs().max() < 1e-6
    assert abs((total.round() != 0).double().mean() - 0.999 / (2 * amplitude)) < 0.01
    for share in (first, second):
        units = share.double() / amplitude * 2**23
        assert torch.equal(units, units.round())
        assert units.abs().max() <= 2**23
        counts = torch.histc(units, 64, -(2**23), 2**23)
        chi = ((counts - counts.mean()).square() / counts.mean()).sum()
        assert abs(chi - 63) < 5 * math.sqrt(2 * 63)


def test_amplitudes_stay_while_they_will_do() -> None:
    """They would tell which requests are for the same text. Each kind of work has its own."""
    levels = Levels(256)
    key = Key((1,), Pass.FORWARD)
    assert levels.at(key, Kind.DECODE, 1, 0.0) == 256
    assert [levels.at(key, Kind.DECODE, 1, float(a)) for a in (64, 32, 16, 64, 4, 0, 128, 64, 4)] == [64] * 6 + [
        128
    ] * 2 + [4]
    assert levels.at(key, Kind.PREFILL, 1, 4096.0) == 4096
    assert levels.at(key, Kind.DECODE, 1, 8.0) == 8


class Sizes(Usual):
    """Made up."""

    def __init__(self, row: float, gradient: float) -> None:
        self.size = lambda key: gradient if key.pass_.is_backward else row  # type: ignore[method-assign,assignment]


def test_amplitudes_of_who_has_the_weights_begin_where_rows_usually_are() -> None:
    """Nothing is seen of requests that are no smaller than a quarter of them, or thousands of times as large, and steps
    of 16 of others. In fp64 nothing of those within a factor of four."""
    levels = Levels(256, Sizes(2.0, 1.0))
    forward, backward = Key((1,), Pass.FORWARD), Key((1,), Pass.BACKWARD)
    assert levels.least == 16
    for size in (0.0, 0.51, 2.0, 8.0, 100.0, 8000.0):
        needed = size_of(torch.full((1, 4), size), levels.least).amplitude
        assert levels.at(forward, Kind.DECODE, 1, needed) == 128
    assert [levels.at(forward, Kind.PREFILL, 1, 2.0**a) for a in (7, 17, 3, 2, 1, 13, 14, 22, 0)] == [
        2.0**a for a in (7, 7, 7, 3, 3, 3, 15, 15, 3)
    ]
    double = Levels(256, Sizes(2.0, 1.0), torch.float64)
    assert [double.at(forward, Kind.DECODE, 1, 2.0**a) for a in (8, 7, 4, 3, 2, 17, 0)] == [
        2.0**a for a in (11, 11, 7, 7, 3, 19, 3)
    ]
    for rows in (1, 7, 64):
        assert levels.at(backward, Kind.FINETUNE, rows, 16 / rows) == 64 / 2.0 ** math.floor(math.log2(rows))


def test_a_model_that_cannot_be_walked(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Amplitudes begin at a constant then, and the tenant is told."""
    model = Layers()
    del model.config
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(1))
    with Masking(LocalPads(model, rows=4), model) as masking:
        (y,) = masking.ask((0,), Pass.FORWARD, x)
        assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)
        assert masking.amplitudes == [512.0]
    assert "how large rows usually are is guessed" in caplog.text + capsys.readouterr().out


def test_mixed_noise_leaves_the_rest_bare_and_says_so() -> None:
    """With k vectors, the projection on their complement is the bare row's; with as many as columns, none is."""
    model = Layers(64, 8)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    for rank, bare in ((16, True), (64, False), (500, False)):
        with Masking(MixedNoise(rank=rank), model) as masking:
            masking.ask((1,), Pass.FORWARD, x)
            calls = {call.key.pass_: call.tensors[0].double() for call in masking.channels[0].seen}
            noise, sent = calls[Pass.FORWARD_WITHOUT_BIAS], calls[Pass.FORWARD]
            assert noise.shape[0] == min(rank, 64)
            span = torch.linalg.qr(noise.t())[0]
            rest, hidden = x.double() - x.double() @ span @ span.t(), sent - sent @ span @ span.t()
            if bare:
                assert torch.allclose(rest, hidden, atol=1e-3)
            else:
                assert rest.norm() < 1e-6


# ------------------------------------------------------------------------------------------------- how often, counted


@pytest.mark.parametrize(("size", "rotate", "refresh"), [(1, 1, 1), (3, 1, 4), (4, 2, 6), (2, 5, 5)])
@pytest.mark.parametrize("rows", [1, 2, 7, 30])
def test_a_pools_vectors_are_used_as_often_as_it_says(size: int, rotate: int, refresh: int, rows: int) -> None:
    model = Layers(32, 8)
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    with Masking(NoisePool(size=size, rotate=rotate, refresh=refresh), model) as masking:
        for _ in range(12):
            (y,) = masking.ask((0,), Pass.FORWARD, x)
            assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)
        masking.channel._helpers and masking.channel._helpers.shutdown(wait=True)
        (amplitude,) = set(masking.amplitudes)
        known = [c.tensors[0] for c in masking.channels[0].seen if c.key.pass_ is Pass.FORWARD_WITHOUT_BIAS]
        vectors = torch.cat(known)
        noise = (torch.cat(masking.masked()) - x.repeat(12, 1)) / amplitude
        distance = torch.cdist(noise.double(), vectors.double())
        near, which = distance.min(dim=1)
        assert near.max() < 1e-2  # each row's noise is one of the vectors: this is what the provider can do, too
        uses = Counter(which.tolist())
        assert max(uses.values()) <= refresh
        assert all(matrix.shape == (size, 32) for matrix in known)
        needed = math.ceil(12 * rows / (size * refresh))
        assert needed <= len(known) <= needed + 1  # asked for in time, and not more often
        if rotate > 1:
            assert all(which[n] == which[n + 1] for n in range(0, 12 * rows - 1, rotate) if n % rotate == 0)


def test_a_pool_is_asked_for_ahead_of_time() -> None:
    model = Layers()
    with Masking(NoisePool(size=4, refresh=4), model) as masking:
        for _ in range(12):
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 24))
        masking.channel._helpers and masking.channel._helpers.shutdown(wait=True)
        kinds = [call.kind for call in masking.channels[0].seen if call.key.pass_ is Pass.FORWARD_WITHOUT_BIAS]
        assert kinds == [Kind.DECODE, Kind.FINETUNE]  # the first as urgent as the rows it came with, the next patient


def test_coefficients_are_never_the_same() -> None:
    model = Layers(32, 8)
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(1)).expand(40, 32).contiguous()
    with Masking(MixedNoise(rank=4), model) as masking:
        for _ in range(5):
            masking.ask((0,), Pass.FORWARD, x)
        (noise,) = [c.tensors[0].double() for c in masking.channels[0].seen if c.key.pass_ is Pass.FORWARD_WITHOUT_BIAS]
        found = torch.cat(masking.masked()).double() - x[:1].double()
        coefficients = torch.linalg.lstsq(noise.t(), found.t()).solution.t()
    apart = torch.cdist(coefficients, coefficients) + torch.eye(200) * 1e9
    assert apart.min() > 1e-3 * coefficients.abs().max()


def noise_of_pads(masking: Masking, x: torch.Tensor) -> torch.Tensor:
    """The integers that rows were masked with, for who knows the rows."""
    (amplitude,) = set(masking.amplitudes)
    step = amplitude * 2.0**-23
    sent = torch.cat(masking.masked())
    q = (x / step).round().repeat(len(sent) // len(x), 1)
    return ((sent / step - q).long() + (1 << 23)) % (1 << 24) - (1 << 23)


def assert_all_different(rows: torch.Tensor) -> None:
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)


@pytest.mark.parametrize("rows", [1, 5])
def test_pads_are_used_once(rows: int) -> None:
    model = Layers(32, 8)
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    with Masking(LocalPads(model, rows=4), model) as masking:
        for _ in range(30):
            masking.ask((0,), Pass.FORWARD, x)
        assert_all_different(noise_of_pads(masking, x))


def test_pads_survive_a_restart_and_none_is_used_twice(tmp_path: Path) -> None:
    model = Layers(32, 8)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    noise = []
    for turn in range(5):
        with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
            for _ in range(turn + 1):
                (y,) = masking.ask((0,), Pass.FORWARD, x)
                assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)
            masking.channel.mask.prepare(masking.channel.asked(Key((0,), Pass.FORWARD))).result(10)  # type: ignore[union-attr]
            noise.append(noise_of_pads(masking, x))
    assert_all_different(torch.cat(noise))
    assert sum(map(len, noise)) == 45
    assert (tmp_path / "pads").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "pads").iterdir())
    # What was ready is ready again, after an orderly end: no pad was skipped, and none has to be made.
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads", when_out="error"), model) as masking:
        for _ in range(2):
            (y,) = masking.ask((0,), Pass.FORWARD, x)
            assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)


def test_pads_of_a_process_that_died_are_skipped(tmp_path: Path) -> None:
    """The counter on disk is ahead of use at any time, so a copy of the folder at any time is safe to go on from."""
    import shutil

    model = Layers(32, 8)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    noise = []
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "alive"), model) as masking:
        for turn in range(8):
            masking.ask((0,), Pass.FORWARD, x)
            shutil.copytree(tmp_path / "alive", tmp_path / f"died-{turn}")
        used = noise_of_pads(masking, x)
    for turn in range(8):
        with Masking(LocalPads(model, rows=8, folder=tmp_path / f"died-{turn}"), model) as masking:
            (y,) = masking.ask((0,), Pass.FORWARD, x)
            assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)
            noise.append(noise_of_pads(masking, x))
        assert_all_different(torch.cat([used[: 2 * turn + 2], noise[-1]]))


def test_a_counter_that_was_cut_or_zeroed(tmp_path: Path) -> None:
    """Nobody knows which pads were used, so none is: from an empty file they would all be used again."""
    model = Layers(32, 8)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
            for _ in range(5):
                masking.ask((0,), Pass.FORWARD, x)
    (file,) = (tmp_path / "pads").glob("*.counter")
    whole = file.read_bytes()
    damaged = [whole[:cut] for cut in range(len(whole))] + [bytes(len(whole)), whole + bytes(1), whole + whole]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for data in damaged:
        file.write_bytes(data)
        with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
            with pytest.raises(PrivacyError, match="counter is damaged, and with it which pads were used"):
                masking.ask((0,), Pass.FORWARD, x)
            assert not masking.masked()
    file.write_bytes(whole)
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
        masking.ask((0,), Pass.FORWARD, x)


@pytest.mark.parametrize("name", ["key", "model"])
def test_a_folder_whose_key_or_model_is_gone(name: str, tmp_path: Path) -> None:
    """With a new key, effects that are ready would be those of other pads."""
    model = Layers(32, 8)
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
        masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
    (tmp_path / "pads" / name).unlink()
    for kept in ("*.counter", "*.effects"):
        with pytest.raises(PrivacyError, match=rf"{name} is gone.*use another folder"):
            Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model)
        (file,) = (tmp_path / "pads").glob(kept)
        file.unlink()
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:  # no pad was ever made
        masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))


def test_a_folder_is_free_while_a_forked_child_lives(tmp_path: Path) -> None:
    """The child has the same lock, whatever it does."""
    model = Layers(32, 8)
    read, write = os.pipe()
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)  # until the parent is done
            os._exit(0)
        os.close(read)
    try:
        with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
    finally:
        os.close(write)
        os.waitpid(child, 0)


def answer_of(masking: Masking, x: torch.Tensor) -> torch.Tensor | None:
    """From a thread of its own; None if none comes."""
    answers: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: answers.extend(masking.ask((0,), Pass.FORWARD, x)), daemon=True)
    thread.start()
    thread.join(300)
    return answers[0] if answers else None


def test_a_process_that_gives_way_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not be let back to a lower niceness, and pads are made all the same."""
    asked: list[int] = []

    def refused(which: int, who: int, niceness: int) -> None:
        asked.append(niceness)
        raise PermissionError

    monkeypatch.setattr(os, "getpriority", lambda which, who: 15)
    monkeypatch.setattr(os, "setpriority", refused)
    with Masking(LocalPads(Layers(), rows=4), Layers()) as masking:
        assert answer_of(masking, torch.ones(1, 24)) is not None
    assert asked == [15]


def test_a_thread_of_pads_that_ends_anywhere_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(32, 8)
    for name in ("use_cores", "_give_way"):
        with monkeypatch.context() as patch:
            patch.setattr(local_pads, name, lambda *_: 1 / 0)
            with Masking(LocalPads(model, rows=4), model) as masking:
                masking.channel.mask._thread.join(300)  # type: ignore[attr-defined]
                with pytest.raises(PrivacyError, match="no more pads"):
                    masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))


@pytest.mark.parametrize("folder", [False, True], ids=["memory", "folder"])
def test_a_draw_that_is_interrupted(folder: bool, tmp_path: Path) -> None:
    """Ctrl-C at each line of it: later results are right, and no pad is used twice."""
    files = (local_pads.__file__, keystream.__file__)
    left = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        # Where a `with` ends, or at a `try`, what a tracer raises may pass by the lock's release; signals come after
        # calls and jumps only.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(("with", "try")):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    model = Layers(32, 8)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    interrupted = 0
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads" if folder else None), model) as masking:
        for left_at_first in range(1, 1000):
            left = left_at_first
            sys.settrace(trace)
            try:
                masking.ask((0,), Pass.FORWARD, x)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            y = answer_of(masking, x)
            assert y is not None
            assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)
            if left > 0:
                break
        assert interrupted > 20
        assert_all_different(noise_of_pads(masking, x))


def test_effects_that_are_damaged_are_made_again(tmp_path: Path) -> None:
    model = Layers(32, 8)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    key = Key((0,), Pass.FORWARD)
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
        masking.channel.mask.prepare(masking.channel.asked(key)).result(10)  # type: ignore[union-attr]
    (kept,) = (tmp_path / "pads").glob("*.effects")
    data = bytearray(kept.read_bytes())
    data[_HEAD.size + 3] ^= 0x40  # the exponent of the first number of the first pad
    kept.write_bytes(data)
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
        for _ in range(6):
            (y,) = masking.ask((0,), Pass.FORWARD, x)
            assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)


def test_a_counter_that_is_gone(tmp_path: Path) -> None:
    """Nobody knows which pads were used."""
    model = Layers(32, 8)
    x = torch.randn(2, 32)
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
        masking.ask((0,), Pass.FORWARD, x)
    (counter,) = (tmp_path / "pads").glob("*.counter")
    counter.unlink()
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
        with pytest.raises(PrivacyError, match="is gone, and with it which pads were used"):
            masking.ask((0,), Pass.FORWARD, x)


def test_a_counter_that_is_written_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = PadCounter(tmp_path / "counter")
    monkeypatch.setattr(os, "write", lambda file, data: len(data) - 1)
    with pytest.raises(OSError, match="written in part"):
        counter.write(5)
    assert counter.value == 0


def test_the_thread_that_makes_pads_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other thread has to, also of those that start later."""
    model = Layers(32, 8)
    effects, threads = OwnWeights.effects, set()

    def watched(*arguments: Any) -> Any:
        threads.add(torch.get_num_threads())
        return effects(*arguments)

    monkeypatch.setattr(OwnWeights, "effects", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Masking(LocalPads(model, rows=8), model) as masking:
            masking.channel.mask.prepare(masking.channel.asked(Key((0,), Pass.FORWARD))).result(10)  # type: ignore[union-attr]
            later: list[int] = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert threads == {1}
        assert later == [2]
    finally:
        torch.set_num_threads(before)


def test_counters_only_go_up(tmp_path: Path) -> None:
    counter = PadCounter(tmp_path / "counter")
    for value in (5, 3, 9, 7):
        counter.reach(value)
    assert counter.value == PadCounter(tmp_path / "counter").value == 9


def _full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Effects need not be kept. Pads whose use cannot be written down are not used; with room again, they are."""
    model = Layers(32, 8)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", _full)
            (y,) = masking.ask((0,), Pass.FORWARD, x)
            assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, x, 256)
            patch.setattr(os, "write", _full)
            with pytest.raises(
                PrivacyError, match=r"cannot be kept on disk .*No space left.*nothing was sent. Make room"
            ):
                masking.ask((1,), Pass.FORWARD, x)
        for _ in range(10):
            (y,) = masking.ask((1,), Pass.FORWARD, x)
            assert_accurate(y, masking.channels[0].table[1], Pass.FORWARD, x, 256)
        assert_all_different(noise_of_pads(masking, x)[2:])


def test_pads_that_are_made_are_on_disk_as_used_before_anybody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whoever sends a row need not wait for a disk."""
    model = Layers(32, 8)
    threads = []
    fsync = os.fsync

    def watched(file: int) -> None:
        threads.append(threading.current_thread().name)
        fsync(file)

    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
        masking.channel.mask.prepare(masking.channel.asked(Key((0,), Pass.FORWARD))).result(10)  # type: ignore[union-attr]
        monkeypatch.setattr(os, "fsync", watched)
        for _ in range(8):
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
            masking.channel.mask.prepare(masking.channel.asked(Key((0,), Pass.FORWARD))).result(10)  # type: ignore[union-attr]
        monkeypatch.undo()
    assert set(threads) == {"symbiosis-pads"}


def test_pads_take_no_descriptors_of_files(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)]).requires_grad_(False)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Masking(LocalPads(model, rows=2, folder=tmp_path / "pads"), model) as masking:
        for layer in range(30):
            masking.ask((layer,), Pass.FORWARD, torch.ones(2, 4))
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 10
    assert len(list((tmp_path / "pads").glob("*.effects"))) == 30


def test_a_forked_child_does_not_use_its_parents_pads(tmp_path: Path) -> None:
    model = Layers(32, 8)
    with Masking(LocalPads(model, rows=8, folder=tmp_path / "pads"), model) as masking:
        masking.ask((0,), Pass.FORWARD, torch.ones(3, 32))
        masking.channel.mask.prepare(masking.channel.asked(Key((0,), Pass.FORWARD))).result(10)  # type: ignore[union-attr]
        (file,) = (tmp_path / "pads").glob("*.counter")
        before = file.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            child = os.fork()
        if not child:
            code = 1
            try:
                masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
            except PrivacyError as error:
                code = 0 if "forked child" in str(error) else 2
            finally:
                masking.channel.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert file.read_bytes() == before
        assert PadCounter(file).value >= 3
        masking.ask((0,), Pass.FORWARD, torch.ones(3, 32))


def test_clients_share_the_weights_that_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one path, they are loaded once."""
    model = Layers(32, 8)
    loaded = []
    monkeypatch.setattr(
        "symbiosis.privacy.own_weights.load_model", lambda path, dtype: loaded.append(path) or Layers(32, 8)
    )
    with Masking(LocalPads(tmp_path), model) as one, Masking(LocalPads(tmp_path), model) as two:
        shares = SecretShares(["a", "b"], model=tmp_path)
        with Masking(shares, model) as three:
            for masking in (one, two, three):
                masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
        assert loaded == [tmp_path]


def test_getting_ready_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(32, 8)
    monkeypatch.setattr(OwnWeights, "effects", lambda *_: 1 / 0)
    with Masking(LocalPads(model, rows=8), model) as masking:
        mask, asked = masking.channel.mask, masking.channel.asked(Key((0,), Pass.FORWARD))
        with pytest.raises(ZeroDivisionError):
            mask.prepare(asked).result(10)  # type: ignore[union-attr]
        with pytest.raises(PrivacyError, match="no more pads can be made"):
            mask.prepare(asked)


def test_fingerprints_look_at_all_columns() -> None:
    """Also of layers whose size is a multiple of what is looked at."""
    model, other = Layers(512, 512), Layers(512, 512)
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            its.copy_(mine)
            if its.ndim == 2:
                its[:, 1:256] += 1.0
    with pytest.raises(PrivacyError, match="other weights"), Masking(LocalPads(other), model):
        pass


def test_out_of_pads() -> None:
    model = Layers(32, 8)
    with Masking(LocalPads(model, rows=4, when_out="error"), model) as masking:
        asked = masking.channel.asked(Key((0,), Pass.FORWARD))
        pads: Any = masking.channel.mask
        pads.prepare(asked).result(10)
        assert pads.ready()[asked.key] == 4
        with pytest.raises(
            PrivacyError, match=r"5 rows for first in .* no more than 4 .*; nothing was sent. Give rows=5"
        ):
            masking.ask((0,), Pass.FORWARD, torch.ones(5, 32))
        assert not masking.masked()
        with pads._changed:  # nothing is made meanwhile
            masking.ask((0,), Pass.FORWARD, torch.ones(3, 32))
            with pytest.raises(PrivacyError, match=r"4 rows for first, and 1 pads ready; nothing was sent.*when_out"):
                masking.ask((0,), Pass.FORWARD, torch.ones(4, 32))
    with Masking(LocalPads(model, rows=4), model) as masking:
        (y,) = masking.ask((0,), Pass.FORWARD, torch.ones(500, 32))  # it waits
        assert y.shape == (500, 8)


def test_pads_that_cannot_be_made_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(32, 8)
    with Masking(LocalPads(model, rows=4), model) as masking:
        monkeypatch.setattr(masking.channel.mask._own, "effects", lambda *_: 1 / 0)  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))
        with pytest.raises(PrivacyError, match="no more pads"):
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 32))


async def test_the_other_share_is_cancelled_when_one_fails() -> None:
    """Of a call from a thread, as backward passes make them."""

    class OnLoop(Direct):
        def __init__(self, model: nn.Module, instance: str) -> None:
            super().__init__(model, instance)
            self.sent: list[Call] = []
            self.cancelled: list[Call] = []

        def send(self, call: Call) -> asyncio.Future[Any]:
            self.sent.append(call)
            return asyncio.get_running_loop().create_future()

        def cancel(self, call: Call) -> None:
            self.cancelled.append(call)

    model = Layers()
    one, two = OnLoop(model, "one"), OnLoop(model, "two")
    one.fails = lambda call: True
    scheme = SecretShares(["a", "b"])
    channel = MaskedChannel([one, two], scheme.begin, asyncio.get_running_loop())  # type: ignore[list-item]
    with pytest.raises(ExecutorClosedError, match="gone"):
        await asyncio.to_thread(channel.call, Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.ones(1, 24),)))
    await asyncio.sleep(0)
    assert len(two.sent) == 1
    assert [id(call) for call in two.cancelled] == [id(call) for call in two.sent]


@pytest.mark.parametrize("name", ["noise-pool", "mixed-noise"])
def test_effects_that_did_not_come_are_asked_for_again_with_other_noise(name: str) -> None:
    model = Layers()
    with Masking(SCHEMES[name](model), model) as masking:
        direct = masking.channels[0]
        direct.fails = lambda call: call.key.pass_ is Pass.FORWARD_WITHOUT_BIAS
        with pytest.raises(ExecutorClosedError):
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 24))
        direct.fails = lambda call: False
        (y,) = masking.ask((0,), Pass.FORWARD, torch.ones(1, 24))
        assert_accurate(y, direct.table[0], Pass.FORWARD, torch.ones(1, 24), 256)
        first, second = [c.tensors[0] for c in direct.seen if c.key.pass_ is Pass.FORWARD_WITHOUT_BIAS]
        assert (first != second).float().mean() > 0.99


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 20), st.integers(1, 20), st.booleans())
def test_rows_in_turn(size: int, rotate: int, first: int, rows: int, skip: bool) -> None:
    matrix = torch.randn(size, 3, generator=torch.Generator().manual_seed(0))
    x = torch.ones(2 * rows, 3)[::2] if skip else torch.ones(rows, 3)
    wanted = torch.stack([x[row] + 0.5 * matrix[(first + row) // rotate % size] for row in range(rows)])
    assert torch.equal(Cycle(matrix).added_to(x, first, rotate, 0.5), wanted)


# ----------------------------------------------------------------------------------------------------------- keystream


def test_keystream_is_aes_256_in_counter_mode() -> None:
    key = bytes(range(32))
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    assert bytes(Keystream(key).raw(100)) == encryptor.update(bytes(100))
    later = Keystream(key)
    later.raw(16 * 3)
    assert Keystream(key, start=3).raw(64) == later.raw(64)


@pytest.mark.parametrize("dtype", BITS)
def test_uniform_numbers(dtype: torch.dtype) -> None:
    stream = Keystream()
    drawn = torch.cat([stream.uniform(rows, 100, dtype) for rows in (1, 2, 500, 1, 300)])
    assert drawn.dtype is dtype
    assert drawn.min() >= -1
    assert drawn.max() < 1
    units = drawn.double() * 2.0 ** (BITS[dtype] - 1)
    assert torch.equal(units, units.round())
    assert len(drawn.unique()) > 0.99 * drawn.numel()  # of 2²⁴, some come twice
    counts = torch.histc(drawn.float(), 32, -1, 1)
    assert ((counts - counts.mean()).square() / counts.mean()).sum() < 31 + 5 * math.sqrt(62)
    assert not torch.equal(Keystream().uniform(1, 100, dtype), Keystream().uniform(1, 100, dtype))


def test_normal_numbers() -> None:
    stream = Keystream()
    drawn = torch.cat([stream.normal(rows, 101) for rows in (1, 2, 500, 1, 1300)]).flatten()
    count = len(drawn)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(drawn.pow(power).mean() - moment) < 5 * math.sqrt(spread / count), power
    counts = torch.histc(torch.special.ndtr(drawn), 64, 0, 1)
    assert ((counts - counts.mean()).square() / counts.mean()).sum() < 63 + 5 * math.sqrt(126)
    neighbours = (drawn[1:] * drawn[:-1]).mean()
    assert abs(neighbours) < 5 / math.sqrt(count)
    assert len(drawn.unique()) > 0.99 * count


def test_pairs_of_normal_numbers_do_not_give_shares_away() -> None:
    """Box and Muller make two of them from a size and an angle. If sizes had 24 bits, exp(-(a² + b²) / 2) would be a
    multiple of 2^-24 for the right row and for no other; it is coarser than the noise's grid where it is small."""
    model = Layers(128, 8)
    x = torch.randn(480, 128, generator=torch.Generator().manual_seed(1))
    with Masking(SecretShares(["a", "b"]), model) as masking:
        masking.ask((0,), Pass.FORWARD, x)
        (first,) = masking.masked(0)
    noise = ((first - x / 2).double() * math.sqrt(3) / size_of(x, 256).amplitude).flatten()
    one, other = noise[: len(noise) // 2], noise[len(noise) // 2 :]
    units = torch.exp(-(one.square() + other.square()) / 2) * 2**24
    units = units[units < 2**20]
    assert len(units) > 1000
    off = (units - units.round()).abs()
    assert abs(off.mean() - 0.25) < 5 * math.sqrt(1 / 48 / len(off))


def test_integers_can_begin_anywhere() -> None:
    """A row takes whole blocks of the cipher, so that pads can be found again by their number."""
    from symbiosis.privacy.keystream import blocks

    key = bytes(32)
    for dtype in BITS:
        for width in (1, 4, 7, 33):
            whole = Keystream(key).integers(6, width, dtype)
            assert whole.shape == (6, width)
            part = Keystream(key, 4 * blocks(width, dtype)).integers(2, width, dtype)
            assert torch.equal(whole[4:], part)


# ----------------------------------------------------------------------------------------------------- what is refused


def test_layers_that_are_not_linear_are_never_sent() -> None:
    model = nn.Module()
    model.mlp = Mlp(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    for make in (SCHEMES["noise-pool"], SCHEMES["mixed-noise"], SCHEMES["secret-shares"]):
        with Masking(make(model), model) as masking:
            for pass_ in (Pass.FORWARD, Pass.BACKWARD):
                tensors = (torch.ones(1, 8),) * (1 + (pass_ is Pass.BACKWARD))
                with pytest.raises(PrivacyError, match=r"mlp is served whole and is not linear.*not sent"):
                    masking.channel.call(Call(Key((0,), pass_), Kind.DECODE, tensors))
            assert not any(channel.seen for channel in masking.channels)


@pytest.mark.parametrize(
    ("spec", "error", "why"),
    [
        ("one-time-pad", UnknownNameError, "unknown privacy scheme 'one-time-pad'; known are noise-pool"),
        ("noise-pool:sice=4", UsageError, "no option 'sice=4'; it takes size"),
        ("noise-pool:size=0", PrivacyError, "size is 0"),
        ("noise-pool:rotate=3,refresh=4", PrivacyError, "multiple of rotate"),
        ("noise-pool:scale=0.5", PrivacyError, "scale is 0.5"),
        ("noise-pool:scale=4,accuracy=1e-3", PrivacyError, "not both"),
        ("noise-pool:accuracy=2", PrivacyError, "accuracy is 2"),
        ("mixed-noise:accuracy=1e-16", PrivacyError, "leaves no room"),
        ("mixed-noise:rank=x", PrivacyError, "rank is 'x'"),
        ("local-pads", UsageError, "model"),
        ("local-pads:model=/nowhere,when_out=panic", PrivacyError, "when_out is 'panic'"),
        ("local-pads:model=/nowhere,folder=5", PrivacyError, r"folder is 5; give a path \(./5"),
        ("secret-shares", PrivacyError, "give both addresses"),
        (NoisePool, UsageError, "give an object"),
        (7, UsageError, "privacy is 7"),
    ],
)
def test_wrong_schemes(spec: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        make_privacy(spec)


def test_specs() -> None:
    assert make_privacy("none") is None
    assert make_privacy(None) is None
    pool = make_privacy("noise-pool: size = 8, scale=64")
    assert isinstance(pool, NoisePool)
    assert (pool.size, pool.scale) == (8, 64.0)
    assert make_privacy(pool) is pool
    shares = make_privacy("secret-shares:with=tcp://host:7000,accuracy=1e-4")
    assert isinstance(shares, SecretShares)
    assert shares.elsewhere("tcp://other:7000") == ("tcp://host:7000",)
    assert "size=8" in repr(pool)
    assert "accuracy=0.0001" in repr(shares)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"addresses": ["tcp://a:1"]}, "give both addresses"),
        ({"addresses": ["tcp://a:1", "tcp://a:1"]}, "an executor that has both"),
        ({"addresses": ["a", "b", "c"]}, "give both addresses"),
        ({"addresses": "tcp://a:1"}, "give a list of two"),
        ({"addresses": ["a", "b"], "with_": "c"}, "give both addresses"),
        ({"with_": "a", "options": "key"}, "give some by name"),
    ],
)
def test_wrong_shares(options: Any, why: str) -> None:
    with pytest.raises(PrivacyError, match=why):
        SecretShares(**options)


def test_shares_need_two_executors_of_one_model() -> None:
    model = Layers()
    assert SecretShares(["a", "b"]).elsewhere("b") == ("a",)
    with pytest.raises(PrivacyError, match="connected to c, which is none of a, b"):
        SecretShares(["a", "b"]).elsewhere("c")
    with pytest.raises(PrivacyError, match="own address"):
        SecretShares(with_="a").elsewhere("a")
    with pytest.raises(PrivacyError, match="different base models"):
        Masking(SecretShares(["a", "b"]), model, Layers(seed=1))
    with Masking(SecretShares(["a", "b"]), model) as masking:
        masking.ask((0,), Pass.FORWARD, torch.ones(1, 24))
        one, two = masking.channels
        two.comes_back_as("another")
        for channel, other in ((one, "another"), (one, "executor 1"), (two, "executor 0")):
            with pytest.raises(PrivacyError, match="lead to the same executor"):
                channel.comes_back_as(other)
        two.comes_back_as("executor 1")  # where it was before


def test_pads_need_the_executors_model(tmp_path: Path) -> None:
    model = Layers()
    with pytest.raises(PrivacyError, match="other weights than the executor serves"):
        Masking(LocalPads(Layers(seed=1)), model)
    with pytest.raises(PrivacyError, match="has no first"):
        Masking(LocalPads(nn.Linear(2, 2)), model)
    with pytest.raises(PrivacyError, match="no model could be loaded"):
        Masking(LocalPads(tmp_path), model)
    narrow = Layers(dtype=torch.bfloat16)
    with Masking(LocalPads(Layers()), narrow) as masking:  # the same weights before they were rounded
        (y,) = masking.ask((0,), Pass.FORWARD, torch.ones(1, 24, dtype=torch.bfloat16))
        assert_accurate(y, masking.channels[0].table[0], Pass.FORWARD, torch.ones(1, 24), 256)


def test_a_folder_of_pads_has_one_client_of_one_model(tmp_path: Path) -> None:
    model = Layers()
    folder = tmp_path / "pads"
    with Masking(LocalPads(model, folder=folder), model):
        with pytest.raises(PrivacyError, match="in use by another client"):
            Masking(LocalPads(model, folder=folder), model)
    other = Layers(seed=1)
    with pytest.raises(PrivacyError, match="pads for another model"):
        Masking(LocalPads(other, folder=folder), other)
    folder.chmod(0o755)
    with pytest.raises(PrivacyError, match="others may look into"):
        Masking(LocalPads(model, folder=folder), model)
    folder.chmod(0o700)
    (folder / "key").write_bytes(b"short")
    with pytest.raises(PrivacyError, match="damaged"):
        Masking(LocalPads(model, folder=folder), model)
    (tmp_path / "file").write_text("")
    with pytest.raises(PrivacyError, match="cannot be used"):
        PadFolder(tmp_path / "file", "weights")


class TestWrap:
    """Numbers may be far larger than their noise: what goes out stays within it, and the turns make up for them."""

    @staticmethod
    def asked(width: int, dtype: torch.dtype) -> Asked:
        spec = LayerSpec(0, "wide", width, 1, dtype, False, True)
        key = Key((0,), Pass.FORWARD)
        return Asked(key, key, (spec,), width, (1,), dtype)

    @pytest.mark.parametrize(
        ("dtype", "times"), [(torch.float32, 253), (torch.float32, 255), (torch.float32, 1e9), (torch.float64, 2045)]
    )
    def test_one_number_that_is_all_there_is(self, dtype: torch.dtype, times: float) -> None:
        width, amplitude = 1000, 0.5
        x = torch.zeros(1, width, dtype=dtype)
        x[0, 3] = -0.999 * amplitude * times
        noise = Keystream(b"k" * 32).integers(1, width, dtype)
        sent, turns = wrap(self.asked(width, dtype), x, noise.clone(), amplitude)
        assert sent.abs().max() <= amplitude
        assert turns is not None
        bare = sent.double() - noise.double() * amplitude * 2.0 ** (1 - BITS[dtype])
        bare[turns.where[:, 0], turns.where[:, 1]] += turns.values.double()
        assert (bare - x).abs().max() <= 2.0**-22 * amplitude
        assert abs(bare[0, 3] / x[0, 3] - 1) < 1e-6

    def test_more_than_fits(self) -> None:
        x, noise = torch.full((1, 4), 1024.0, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.int64)
        with pytest.raises(PrivacyError, match=r"a row of 4 numbers has one 2.05e\+03 times as large as its noise"):
            wrap(self.asked(4, torch.float64), x, noise, 0.5)
        assert wrap(self.asked(4, torch.float64), x, noise, 1.0)[1] is not None
