"""Noise of privacy schemes: its amplitudes, its random numbers, how often a pool uses it, and sums that wrap around."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.core.requests import Key, LayerSpec, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import ExecutorClosedError, PrivacyError
from symbiosis.privacy import LocalPads, NoisePool
from symbiosis.privacy.amplitude import Amplitudes, required_amplitude
from symbiosis.privacy.keystream import BITS, Keystream, blocks
from symbiosis.privacy.masks import MaskedKey
from symbiosis.privacy.noise_pool import Rotation
from symbiosis.privacy.typical_sizes import TypicalSizes
from symbiosis.privacy.wrapped import wrap
from tests.privacy.masking import SCHEMES, Layers, Masking, assert_uniform, normal_rows

# Amplitudes.


def test_amplitudes_stay_while_they_are_acceptable() -> None:
    """Amplitudes that follow requests would identify requests for the same text. Each kind of work has its own
    amplitude.
    """
    amplitudes = Amplitudes(256)
    key = Key((1,), Pass.FORWARD)
    assert amplitudes.choose(key, Kind.DECODE, 1, 0.0) == 256
    required = (64, 32, 16, 64, 4, 0, 128, 64, 4)
    chosen = [amplitudes.choose(key, Kind.DECODE, 1, float(amplitude)) for amplitude in required]
    assert chosen == [64] * 6 + [128] * 2 + [4]
    assert amplitudes.choose(key, Kind.PREFILL, 1, 4096.0) == 4096
    assert amplitudes.choose(key, Kind.DECODE, 1, 8.0) == 8


class Sizes(TypicalSizes):
    """Typical sizes without a model."""

    def __init__(self, row: float, gradient: float) -> None:
        self.size = lambda key: gradient if key.pass_.is_backward else row  # type: ignore[method-assign,assignment]


def test_amplitudes_with_the_public_weights_begin_at_typical_sizes() -> None:
    """Rows between a quarter of the typical size and thousands of times that size do not change the amplitude.

    Smaller and larger rows change it in steps of 16. In fp64 the amplitude stays within a factor of four only.
    """
    amplitudes = Amplitudes(256, Sizes(2.0, 1.0))
    forward, backward = Key((1,), Pass.FORWARD), Key((1,), Pass.BACKWARD)
    assert amplitudes.least == 16
    for size in (0.0, 0.51, 2.0, 8.0, 100.0, 8000.0):
        required = required_amplitude(torch.full((1, 4), size), amplitudes.least)
        assert required is not None
        assert amplitudes.choose(forward, Kind.DECODE, 1, required) == 128
    powers = (7, 17, 3, 2, 1, 13, 14, 22, 0)
    chosen = [amplitudes.choose(forward, Kind.PREFILL, 1, 2.0**power) for power in powers]
    assert chosen == [2.0**power for power in (7, 7, 7, 3, 3, 3, 15, 15, 3)]
    double = Amplitudes(256, Sizes(2.0, 1.0), torch.float64)
    chosen = [double.choose(forward, Kind.DECODE, 1, 2.0**power) for power in (8, 7, 4, 3, 2, 17, 0)]
    assert chosen == [2.0**power for power in (11, 11, 7, 7, 3, 19, 3)]
    for rows in (1, 7, 64):
        chosen_for_gradient = amplitudes.choose(backward, Kind.FINETUNE, rows, 16 / rows)
        assert chosen_for_gradient == 64 / 2.0 ** math.floor(math.log2(rows))


def test_a_model_that_cannot_be_run(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Amplitudes then begin at a constant, and a warning is logged."""
    model = Layers()
    del model.config
    with Masking(LocalPads(model, rows=4), model) as masking:
        masking.assert_forward(normal_rows(2, 24))
        assert masking.amplitudes == [512.0]
    assert "typical sizes of rows are guessed" in caplog.text + capsys.readouterr().out


# Noise pools.


@pytest.mark.parametrize(("size", "refresh"), [(1, 1), (3, 4), (4, 6), (2, 5)])
@pytest.mark.parametrize("rows", [1, 2, 7, 30])
def test_vectors_of_a_pool_are_used_as_often_as_stated(size: int, refresh: int, rows: int) -> None:
    model = Layers(32, 8)
    x = normal_rows(rows, 32)
    with Masking(NoisePool(size=size, refresh=refresh), model) as masking:
        for _ in range(12):
            masking.assert_forward(x)
    (amplitude,) = set(masking.amplitudes)
    known = masking.vectors()
    noise = (torch.cat(masking.masked()) - x.repeat(12, 1)) / amplitude
    nearest, which = torch.cdist(noise.double(), torch.cat(known).double()).min(dim=1)
    assert nearest.max() < 1e-2  # the noise of each row is one of the vectors, which the provider can detect too
    assert max(Counter(which.tolist()).values()) <= refresh
    assert all(matrix.shape == (size, 32) for matrix in known)
    needed = math.ceil(12 * rows / (size * refresh))
    assert needed <= len(known) <= needed + 1  # effects are requested in time, and not more often


def test_a_pool_is_requested_ahead_of_time() -> None:
    """The first pool is as urgent as the rows that need it, and the next one is less urgent."""
    model = Layers()
    with Masking(NoisePool(size=4, refresh=4), model) as masking:
        for _ in range(12):
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 24))
    kinds = [call.kind for call in masking.channels[0].seen if call.key.pass_ is Pass.FORWARD_WITHOUT_BIAS]
    assert kinds == [Kind.DECODE, Kind.FINETUNE]


def test_effects_that_failed_are_requested_again_with_other_noise() -> None:
    model = Layers()
    with Masking(SCHEMES["noise-pool"](model), model) as masking:
        direct = masking.channels[0]
        direct.fails = lambda call: call.key.pass_ is Pass.FORWARD_WITHOUT_BIAS
        with pytest.raises(ExecutorClosedError):
            masking.ask((0,), Pass.FORWARD, torch.ones(1, 24))
        direct.fails = lambda call: False
        masking.assert_forward(torch.ones(1, 24))
        first, second = masking.vectors()
        assert (first != second).float().mean() > 0.99


@given(st.integers(1, 6), st.integers(0, 20), st.integers(1, 20), st.booleans())
def test_rows_in_rotation(size: int, first: int, rows: int, strided: bool) -> None:
    matrix = normal_rows(size, 3, seed=0)
    x = torch.ones(2 * rows, 3)[::2] if strided else torch.ones(rows, 3)
    wanted = torch.stack([x[row] + 0.5 * matrix[(first + row) % size] for row in range(rows)])
    assert torch.equal(Rotation(matrix).added_to(x, first, 0.5), wanted)


# Random numbers.


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
    assert len(drawn.unique()) > 0.99 * drawn.numel()  # some of 2²⁴ numbers occur twice
    assert_uniform(drawn.float(), 32, -1, 1)
    assert not torch.equal(Keystream().uniform(1, 100, dtype), Keystream().uniform(1, 100, dtype))


def test_normal_numbers() -> None:
    stream = Keystream()
    drawn = torch.cat([stream.normal(rows, 101) for rows in (1, 2, 500, 1, 1300)]).flatten()
    count = len(drawn)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(drawn.pow(power).mean() - moment) < 5 * math.sqrt(spread / count), power
    assert_uniform(torch.special.ndtr(drawn), 64, 0, 1)
    neighbours = (drawn[1:] * drawn[:-1]).mean()
    assert abs(neighbours) < 5 / math.sqrt(count)
    assert len(drawn.unique()) > 0.99 * count


@pytest.mark.parametrize("width", [1, 4, 7, 33])
@pytest.mark.parametrize("dtype", BITS)
def test_integers_can_begin_at_any_row(dtype: torch.dtype, width: int) -> None:
    """A row takes whole blocks of the cipher, so the number of a pad determines its position."""
    whole = Keystream(bytes(32)).integers(6, width, dtype)
    assert whole.shape == (6, width)
    part = Keystream(bytes(32), 4 * blocks(width, dtype)).integers(2, width, dtype)
    assert torch.equal(whole[4:], part)


# Sums that wrap around: numbers may be far larger than their noise.


def _key(width: int, dtype: torch.dtype) -> MaskedKey:
    spec = LayerSpec(0, "wide", width, 1, dtype, False, True)
    key = Key((0,), Pass.FORWARD)
    return MaskedKey(key, key, (spec,), width, (1,), dtype)


@pytest.mark.parametrize(
    ("dtype", "times"), [(torch.float32, 253), (torch.float32, 255), (torch.float32, 1e9), (torch.float64, 2045)]
)
def test_a_large_number_is_sent_within_the_amplitude(dtype: torch.dtype, times: float) -> None:
    width, amplitude = 1000, 0.5
    x = torch.zeros(1, width, dtype=dtype)
    x[0, 3] = -0.999 * amplitude * times
    noise = Keystream(b"k" * 32).integers(1, width, dtype)
    sent, wrapped = wrap(_key(width, dtype), x, noise.clone(), amplitude)
    assert sent.abs().max() <= amplitude
    assert wrapped is not None
    bare = sent.double() - noise.double() * amplitude * 2.0 ** (1 - BITS[dtype])
    bare[wrapped.positions[:, 0], wrapped.positions[:, 1]] += wrapped.missing.double()
    assert (bare - x).abs().max() <= 2.0**-22 * amplitude
    assert abs(bare[0, 3] / x[0, 3] - 1) < 1e-6


def test_a_number_that_does_not_fit_is_refused() -> None:
    x, noise = torch.full((1, 4), 1024.0, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(PrivacyError, match=r"a row of 4 numbers has one that is 2.05e\+03 times as large as its noise"):
        wrap(_key(4, torch.float64), x, noise, 0.5)
    assert wrap(_key(4, torch.float64), x, noise, 1.0)[1] is not None
