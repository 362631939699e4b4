"""The latency model with which policies fill time budgets."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.core.requests import Key, Pass
from symbiosis.policies.latency import Fit, LatencyModel

KEY = Key((0,), Pass.FORWARD)


def learned(start: float, slope: float, sizes: list[int], noise: float = 0.0) -> Fit:
    rng = random.Random(0)
    line = Fit()
    for rows in sizes:
        line.learn(rows, (start + slope * rows) * (1 + noise * rng.uniform(-1, 1)))
    return line


@given(st.floats(1e-6, 1.0), st.floats(0, 1e-3), st.lists(st.integers(1, 8192), min_size=2, max_size=50, unique=True))
def test_finds_the_line(start: float, slope: float, sizes: list[int]) -> None:
    line = learned(start, slope, [min(sizes), 16 * max(sizes), *sizes])
    for rows in sizes:
        assert line.predict(rows) == pytest.approx(start + slope * rows, rel=0.05, abs=1e-9)


def test_noise_is_averaged() -> None:
    line = learned(2e-3, 1e-5, [1, 8, 64, 512, 2048] * 40, noise=0.3)
    assert line.predict(1000) == pytest.approx(12e-3, rel=0.2)


def test_equal_sizes_make_larger_batches_look_expensive() -> None:
    line = learned(1e-3, 1e-7, [4] * 20)
    assert line.predict(4) == pytest.approx(1e-3, rel=0.01)
    assert line.predict(40) == pytest.approx(10e-3, rel=0.01)
    assert Fit().predict(7) == 0.0


garbage = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.just(0.0),
    st.just(-1.0),
    st.floats(0, 1e-300),
    st.floats(1e3, 1e9),
)


@given(st.lists(st.tuples(st.integers(-5, 10_000), garbage), max_size=60), st.integers(1, 8192), st.floats(0, 10))
def test_invalid_measurements_give_valid_estimates(measured: list[tuple[int, float]], rows: int, budget: float) -> None:
    line = Fit()
    for size, seconds in measured:
        line.learn(size, seconds)
    start, slope = line.coefficients
    assert 0 <= start < math.inf
    assert 0 <= slope < math.inf
    assert 0 <= line.predict(rows) < math.inf
    assert 0 <= line.rows_within(budget, rows) <= rows


def test_outliers_are_ignored_and_changes_are_followed() -> None:
    line = learned(1e-3, 1e-5, [1, 16, 256] * 30)
    before = line.predict(100)
    line.learn(100, 60.0)  # the machine was suspended
    assert line.predict(100) < 2 * before
    for rows in [1, 16, 256] * 200:
        line.learn(rows, 3 * (1e-3 + 1e-5 * rows))
    assert line.predict(100) == pytest.approx(3 * before, rel=0.1)


@pytest.mark.parametrize("when", range(8))
@pytest.mark.parametrize("factor", [1000.0, 1e-3])
@pytest.mark.parametrize("sizes", [[1, 16, 256], [8]])
def test_an_outlier_among_the_first_is_forgotten(when: int, factor: float, sizes: list[int]) -> None:
    """A slow first batch, as on a GPU or a busy machine, has no effect after eight batches."""
    line = Fit()
    for count, rows in zip(range(8), itertools.cycle(sizes), strict=False):
        line.learn(rows, (1e-3 + 1e-5 * rows) * (factor if count == when else 1.0))
    for rows in sizes:
        assert line.predict(rows) == pytest.approx(1e-3 + 1e-5 * rows, rel=1e-6)


@given(st.floats(1e-6, 1e-1), st.floats(1e-8, 1e-3), st.floats(1e-6, 10.0), st.integers(1, 8192))
def test_rows_within_is_the_inverse(start: float, slope: float, budget: float, most: int) -> None:
    line = learned(start, slope, [1, 100, 8192])
    rows = line.rows_within(budget, most)
    if rows:
        assert line.predict(rows) <= budget * (1 + 1e-6)
    if rows < most:
        assert line.predict(rows + 1) >= budget * (1 - 1e-6)


def test_keys_are_separate_and_their_number_is_bounded() -> None:
    model = LatencyModel()
    model[KEY].learn(1, 1.0)
    assert model[KEY].predict(1) == 1.0
    assert model[Key((1,), Pass.FORWARD)].predict(1) == 0.0
    model[KEY].learn(1, 1.0)
    for layer in range(30_000):
        model[Key((layer,), Pass.FORWARD)].learn(1, 1.0)
    assert len(model._lines) <= 20_000
    assert model[KEY].predict(1) == 1.0  # keys with the fewest measurements are forgotten first
