"""Options of privacy schemes, and inputs that schemes refuse: other models, other executors, nonlinear layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from symbiosis.core.registry import make_privacy
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import PrivacyError, UnknownNameError, UsageError
from symbiosis.privacy import LocalPads, NoisePool, SecretShares
from tests.privacy.masking import SCHEMES, Layers, Masking


@pytest.mark.parametrize(
    ("spec", "error", "why"),
    [
        ("one-time-pad", UnknownNameError, "unknown privacy scheme 'one-time-pad'; known are noise-pool"),
        ("noise-pool:sice=4", UsageError, "no option 'sice=4'; it takes size"),
        ("noise-pool:size=0", PrivacyError, "size is 0"),
        ("noise-pool:size=x", PrivacyError, "size is 'x'"),
        ("noise-pool:refresh=0", PrivacyError, "refresh is 0"),
        ("noise-pool:scale=0.5", PrivacyError, "scale is 0.5"),
        ("noise-pool:scale=4,accuracy=1e-3", PrivacyError, "not both"),
        ("noise-pool:accuracy=2", PrivacyError, "accuracy is 2"),
        ("noise-pool:accuracy=1e-16", PrivacyError, "leaves no room"),
        ("local-pads", UsageError, "model"),
        ("local-pads:model=/nowhere,when_out=panic", PrivacyError, "when_out is 'panic'"),
        ("local-pads:model=/nowhere,folder=5", PrivacyError, r"folder is 5; give a path \(./5"),
        ("secret-shares", PrivacyError, "give the address of the other one"),
        (NoisePool, UsageError, "give an object"),
        (7, UsageError, "privacy is 7"),
    ],
)
def test_wrong_schemes(spec: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        make_privacy(spec)


def test_schemes_from_text() -> None:
    assert make_privacy("none") is None
    assert make_privacy(None) is None
    pool = make_privacy("noise-pool: size = 8, scale=64")
    assert isinstance(pool, NoisePool)
    assert (pool.size, pool.scale) == (8, 64.0)
    assert make_privacy(pool) is pool
    shares = make_privacy("secret-shares:with=tcp://host:7000,accuracy=1e-4")
    assert isinstance(shares, SecretShares)
    assert shares.further_addresses("tcp://other:7000") == ("tcp://host:7000",)
    assert "size=8" in repr(pool)
    assert "accuracy=0.0001" in repr(shares)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"with_": ["a", "b"]}, "give the address of the other one"),
        ({"with_": "a", "options": "key"}, "give a mapping"),
    ],
)
def test_wrong_options_of_shares(options: Any, why: str) -> None:
    with pytest.raises(PrivacyError, match=why):
        SecretShares(**options)


def test_shares_need_two_executors_of_one_model() -> None:
    model = Layers()
    with pytest.raises(PrivacyError, match="own address"):
        SecretShares(with_="a").further_addresses("a")
    with pytest.raises(PrivacyError, match="different base models"):
        Masking(SecretShares("b"), model, Layers(seed=1))
    with Masking(SecretShares("b"), model) as masking:
        masking.ask((0,), Pass.FORWARD, torch.ones(1, 24))
        one, two = masking.channels
        two.reconnect("another")
        for channel, other in ((one, "another"), (one, "executor 1"), (two, "executor 0")):
            with pytest.raises(PrivacyError, match="lead to the same executor"):
                channel.reconnect(other)
        two.reconnect("executor 1")  # a channel may return to an executor that it was connected to before


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
        masking.assert_accurate(y, torch.ones(1, 24))


def test_fingerprints_cover_all_columns() -> None:
    """This includes layers whose size is a multiple of the size of the sample."""
    model, other = Layers(512, 512), Layers(512, 512)
    with torch.no_grad():
        for parameter, changed in zip(model.parameters(), other.parameters(), strict=True):
            changed.copy_(parameter)
            if changed.ndim == 2:
                changed[:, 1:256] += 1.0
    with pytest.raises(PrivacyError, match="other weights"), Masking(LocalPads(other), model):
        pass


class Mlp(nn.Sequential):
    """A module that is served whole and is not linear."""


@pytest.mark.parametrize("name", ["noise-pool", "secret-shares"])
@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.BACKWARD])
def test_nonlinear_layers_are_never_sent(name: str, pass_: Pass) -> None:
    model = nn.Module()
    model.mlp = Mlp(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    with Masking(SCHEMES[name](model), model) as masking:
        tensors = (torch.ones(1, 8),) * (1 + (pass_ is Pass.BACKWARD))
        with pytest.raises(PrivacyError, match=r"mlp is served whole and is not linear.*not sent"):
            masking.channel.call(Call(Key((0,), pass_), Kind.DECODE, tensors))
        assert not any(channel.seen for channel in masking.channels)
