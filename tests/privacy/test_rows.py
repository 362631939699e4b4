"""Rows under each privacy scheme: results equal those of the bare rows, and the rows that are sent do not show them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.share import Resident
from symbiosis.core.terms import Kind
from symbiosis.errors import ExecutorClosedError, PrivacyError
from symbiosis.privacy import LocalPads, MaskedChannel, NoisePool, SecretShares, precision
from tests.privacy.masking import (
    FORWARD,
    SCHEMES,
    WRAPPED,
    Direct,
    Layers,
    Masking,
    all_schemes,
    assert_uniform,
    normal_rows,
)

# Results.


@all_schemes
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
                for layer, result in zip(asked, results, strict=True):
                    assert result.dtype is dtype
                    masking.assert_accurate(result, x, layer, pass_, scale, largest)
                largest = max(largest, x.double().norm(dim=1).amax().item())


@all_schemes
def test_rows_of_many_sizes_in_one_request(name: str) -> None:
    """A request may have very small rows, a zero row, and one very large number, as activations of models do."""
    model = Layers(256, 64)
    x = normal_rows(6, 256)
    x[1] *= 1e-3
    x[2] = 0
    x[3, 17] = 500.0
    with Masking(SCHEMES[name](model), model) as masking:
        masking.assert_forward(x)


@all_schemes
@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-30, 1e-12, 1e15])
def test_rows_near_the_ends_of_the_range(name: str, magnitude: float) -> None:
    model = Layers()
    x = normal_rows(2, 24) * magnitude
    with Masking(SCHEMES[name](model), model) as masking:
        (y,) = masking.ask((1,), Pass.FORWARD, x)
        assert y.isfinite().all()
        if magnitude > 1e-20:
            masking.assert_accurate(y, x, 1)
        else:  # the amplitude of noise has a lower limit, so that it does not vanish
            assert y.abs().max() < 1e-20 or magnitude == 0.0
        assert all(rows.count_nonzero() > 0.9 * rows.numel() for rows in masking.masked())


@all_schemes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_rows_that_are_not_finite(name: str, bad: float) -> None:
    """Such rows are not sent. Their results are NaN, as a loss scaler expects, and other rows have right results."""
    model = Layers()
    x = normal_rows(3, 24)
    x[1, 5] = bad
    with Masking(SCHEMES[name](model), model) as masking:
        y, z = masking.ask((0, 1), Pass.FORWARD, x)
        for number in range(len(masking.channels)):
            assert all(rows.isfinite().all() for rows in masking.masked(number))
        assert y[1].isnan().all()
        assert z[1].isnan().all()
        masking.assert_accurate(y[[0, 2]], x[[0, 2]])
        (dx,) = masking.ask((0,), Pass.BACKWARD, torch.full((1, 40), bad))
        assert dx.isnan().all()


@all_schemes
def test_masks_do_not_draw_from_the_tenants_generators(name: str) -> None:
    model = Layers()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with Masking(SCHEMES[name](model), model) as masking:
        masking.ask((0,), Pass.FORWARD, torch.ones(2, 24))
    assert torch.equal(torch.rand(3), wanted)


@all_schemes
def test_masks_do_not_depend_on_the_tenants_torch_modes(name: str) -> None:
    """Autocast would compute masks in bf16, and inference mode would make tensors that autograd refuses."""
    model = Layers()
    x = normal_rows(2, 24)
    with Masking(SCHEMES[name](model), model) as masking:
        for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.enable_grad()):
            with mode:
                rows = x.clone()
                masking.ask((1,), Pass.FORWARD, rows)  # the first request makes noise as well
                masked, unmask = masking.channel._masked(Call(Key((1,), Pass.FORWARD), Kind.DECODE, (rows,)))
            for wait in masked.waits:
                wait.result(10)
            answers = [c.call(part) for c, part in zip(masking.channels, masked.calls, strict=True)]
            with torch.autocast("cpu", torch.bfloat16):
                (y,) = unmask(answers)
            masking.assert_accurate(y, x, 1)


@pytest.fixture
def medium_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("medium_precision")
@pytest.mark.parametrize(("name", "resident"), [*((name, True) for name in SCHEMES), ("local-pads", False)])
@pytest.mark.parametrize("lossy", [False, True])
def test_products_of_lower_precision(name: str, resident: bool, lossy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused if this process computes them, whether as an executor or for the effects of noise."""
    model, mm = Layers(), torch.Tensor.mm

    def rounded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply as CPUs with matrix instructions for bf16 do."""
        narrow = torch.bfloat16 if x.dtype is torch.float32 else x.dtype
        return mm(x.to(narrow).to(x.dtype), weight.to(narrow).to(x.dtype))

    if lossy:
        monkeypatch.setattr(torch.Tensor, "mm", rounded)
    if resident:
        monkeypatch.setattr(Direct, "share", Resident(model, []))
    monkeypatch.setattr(precision, "_is_exact", precision._is_exact.__wrapped__)
    with Masking(SCHEMES[name](model), model) as masking:
        if lossy:
            with pytest.raises(PrivacyError, match=r"lower precision on cpu .*'bf16'.* set it to 'ieee'"):
                masking.ask((0,), Pass.FORWARD, normal_rows(3, 24))
            if resident:  # products are not known from a time of lower precision either
                with pytest.raises(PrivacyError, match="lower precision"):
                    masking.channel.prepare_blocking([Key((0,), Pass.FORWARD)])
            assert not (resident and masking.masked())
        else:
            masking.assert_forward(normal_rows(3, 24))


@all_schemes
def test_threads_share_a_channel(name: str) -> None:
    model = Layers()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(20):
                masking.assert_forward(torch.randn(2, 24, generator=generator))
        except BaseException as error:  # noqa: BLE001 (the main thread reports the error)
            failures.append(error)

    with Masking(SCHEMES[name](model), model) as masking:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures, failures


async def test_the_other_share_is_cancelled_when_one_fails() -> None:
    """The call is made on a thread, as by backward passes."""

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
    begin = SecretShares("b").begin
    channel = MaskedChannel([one, two], begin, asyncio.get_running_loop())  # type: ignore[list-item]
    with pytest.raises(ExecutorClosedError, match="gone"):
        await asyncio.to_thread(channel.call, Call(FORWARD, Kind.DECODE, (torch.ones(1, 24),)))
    await asyncio.sleep(0)
    assert len(two.sent) == 1
    assert [id(call) for call in two.cancelled] == [id(call) for call in two.sent]


def test_a_walk_begins_at_both_executors_or_at_none() -> None:
    class Walking(Direct):
        in_walk = False

        def begin_walk(self) -> None:
            if self.instance == "lost":
                raise ExecutorClosedError("gone")
            self.in_walk = True

        def end_walk(self) -> None:
            self.in_walk = False

    model = Layers()
    for other in ("two", "lost"):
        channels = [Walking(model, "one"), Walking(model, other)]
        channel = MaskedChannel(channels, SecretShares("b").begin)  # type: ignore[arg-type]
        with pytest.raises(ExecutorClosedError) if other == "lost" else contextlib.nullcontext():
            channel.begin_walk()
        assert [each.in_walk for each in channels] == 2 * [other == "two"]


# Accuracy.


@all_schemes
@settings(max_examples=40)
@given(data=st.data())
def test_accuracy_is_kept(name: str, data: st.DataObject) -> None:
    """``accuracy=`` bounds the error relative to the result of the largest row of the request.

    After larger rows the bound is relative to those, or to 16 times this request's, whichever is less. With the public
    weights it is always relative to this request's.
    """
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
        for exponents in sizes:
            x = torch.randn(len(exponents), width, dtype=dtype, generator=generator)
            x *= torch.tensor([10.0**exponent for exponent in exponents], dtype=dtype)[:, None]
            x[0, 0] *= data.draw(st.sampled_from([1.0, 100.0]), "outlier")
            largest = x.double().norm(dim=1).amax().item()
            size = largest if name in WRAPPED else min(16 * largest, max(largest, before))
            assert _error(masking, x) <= accuracy * size * masking.weight_rms(1)
            before = max(before, largest)


@all_schemes
@pytest.mark.parametrize("width", [16_384, 53_248])
def test_accuracy_is_kept_by_wide_layers(name: str, width: int) -> None:
    model = Layers(width, 16)
    generator = torch.Generator().manual_seed(1)
    with Masking(SCHEMES[name](model, accuracy=1e-3), model) as masking:
        for rows in (1, 4, 20):
            x = torch.randn(rows, width, generator=generator)
            size = x.double().norm(dim=1).amax().item() * masking.weight_rms(1)
            assert 1e-5 * size < _error(masking, x) <= 1e-3 * size  # a much smaller error would mean less noise


def _error(masking: Masking, x: torch.Tensor) -> float:
    """Return the largest rms error of a row of the second layer's result."""
    (y,) = masking.ask((1,), Pass.FORWARD, x)
    return (y.double() - masking.exact(x, 1)).square().mean(dim=1).sqrt().max().item()


def test_accuracy_depends_on_the_dtype_of_rows() -> None:
    """fp64 allows for a far better accuracy than fp32. The dtype is known when a client is opened."""
    least = NoisePool(accuracy=1e-4).amplitudes_for(Direct(Layers())).least  # type: ignore[arg-type]
    assert least == pytest.approx(1e-4 / 1.5e-6)
    fine = LocalPads(Layers(dtype=torch.float64), accuracy=1e-9)
    with Masking(fine, Layers(dtype=torch.float64)):
        pass
    with pytest.raises(
        PrivacyError,
        match=r"accuracy=1e-09 leaves no room for noise; the limit is 1.5e-06 .* fp32 .* up to 80 columns wide",
    ):
        Masking(LocalPads(Layers(), accuracy=1e-9), Layers())
    assert repr(fine).endswith("accuracy=1e-09")


# Rows that are sent.


@all_schemes
def test_no_bare_row_is_sent(name: str) -> None:
    """Correlations of the rows that were sent with true rows are those of chance, for noise of this size."""
    model = Layers(512, 64)
    x = normal_rows(64, 512)
    with Masking(SCHEMES[name](model), model) as masking:
        for row in x:
            masking.ask((1,), Pass.FORWARD, row[None])
        for channel in masking.channels:
            for call in channel.seen:
                for sent in call.tensors[0]:
                    cosine = (x @ sent) / (x.norm(dim=1) * sent.norm())
                    assert cosine.abs().max() < 6 / math.sqrt(512)


@all_schemes
def test_amplitudes_are_powers_of_two(name: str) -> None:
    """The size of a request is therefore visible up to a factor of two, or of 16 with the public weights."""
    model = Layers(64, 64)
    for magnitude in (0.9, 1.1, 3.0):
        x = normal_rows(1, 64)
        x *= magnitude / x.square().mean().sqrt()
        with Masking(SCHEMES[name](model, scale=100), model) as masking:
            masking.ask((1,), Pass.FORWARD, x)
            (amplitude,) = masking.amplitudes
            assert math.log2(amplitude).is_integer()
            if name in WRAPPED:
                assert 100 / 16 * magnitude <= amplitude <= 200 * magnitude
            else:
                assert amplitude == 2.0 ** math.ceil(math.log2(100 * magnitude))
            bound = 4 if name == "secret-shares" else 1.1
            for number in range(len(masking.channels)):
                assert all(rows.abs().max() < bound * amplitude for rows in masking.masked(number))


def _units(sent: torch.Tensor, step: float) -> torch.Tensor:
    """Return rows as integers in units of the grid that they are on, and check that they are on it."""
    units = sent.double() / step
    assert torch.equal(units, units.round())
    return units


def _assert_low_bits_uniform(units: torch.Tensor) -> None:
    assert_uniform((units.long() & 15).double(), 16, 0, 16)


def test_pads_leave_nothing_of_the_rows() -> None:
    """Rows at the very edge of the amplitude are sent as uniform numbers on the grid."""
    model = Layers(64, 8)
    with Masking(LocalPads(model, rows=200, scale=1), model) as masking:
        masking.ask((1,), Pass.FORWARD, torch.ones(400, 64) * 0.999)
        (sent,), (amplitude,) = masking.masked(), masking.amplitudes
    units = _units(sent, amplitude * 2.0**-23)
    assert units.min() >= -(2**23)
    assert units.max() < 2**23
    assert_uniform(units, 64, -(2**23), 2**23)
    _assert_low_bits_uniform(units)


def test_gaussian_shares_sum_to_the_row_and_hide_its_last_bits() -> None:
    """Each share is half a row plus Gaussian noise, and the last bits of a share are noise."""
    model = Layers(64, 8)
    x = normal_rows(50, 64)
    with Masking(SecretShares("b"), model) as masking:
        masking.ask((1,), Pass.FORWARD, x)
        (first,), (second,) = masking.masked(0), masking.masked(1)
        (amplitude,) = masking.amplitudes
    step = amplitude * 2.0**-21
    assert torch.equal(first + second, (x / step).round() * step)  # exactly
    for share in (first, second):
        _assert_low_bits_uniform(_units(share, step))
        unit = (share - x / 2).double() / amplitude * math.sqrt(3)
        assert abs(unit.mean()) < 5 / math.sqrt(3200)
        assert abs(unit.square().mean() - 1) < 5 * math.sqrt(2 / 3200)
        assert abs(unit.pow(4).mean() - 3) < 5 * math.sqrt(96 / 3200)  # uniform numbers would have 1.8


def test_pairs_of_normal_numbers_do_not_identify_shares() -> None:
    """Box and Muller's method makes two normal numbers from a size and an angle.

    If sizes had 24 bits, exp(-(a² + b²) / 2) would be a multiple of 2^-24 for the right row and for no other. Where it
    is small, that is coarser than the grid of the noise.
    """
    model = Layers(128, 8)
    x = normal_rows(480, 128)
    with Masking(SecretShares("b"), model) as masking:
        masking.ask((0,), Pass.FORWARD, x)
        (first,), (amplitude,) = masking.masked(0), masking.amplitudes
    noise = ((first - x / 2).double() * math.sqrt(3) / amplitude).flatten()
    one, other = noise[: len(noise) // 2], noise[len(noise) // 2 :]
    units = torch.exp(-(one.square() + other.square()) / 2) * 2**24
    units = units[units < 2**20]
    assert len(units) > 1000
    off = (units - units.round()).abs()
    assert abs(off.mean() - 0.25) < 5 * math.sqrt(1 / 48 / len(off))


def test_wrapped_shares_leave_nothing_of_the_rows() -> None:
    """Each share is uniform on its grid. The results are right, and as many numbers are wrapped as expected."""
    model = Layers(64, 8)
    edge = torch.ones(400, 64) * 0.999
    with Masking(SecretShares("b", model=model, scale=16), model) as masking:
        masking.assert_forward(edge, 1, 16)
        (first,), (second,), (amplitude,) = masking.masked(0), masking.masked(1), masking.amplitudes
    turns = (first.double() + second.double() - edge.double()) / (2 * amplitude)
    assert (turns - turns.round()).abs().max() < 1e-6
    assert abs((turns.round() != 0).double().mean() - 0.999 / (2 * amplitude)) < 0.01
    for share in (first, second):
        units = _units(share, amplitude * 2.0**-23)
        assert units.abs().max() <= 2**23
        assert_uniform(units, 64, -(2**23), 2**23)
