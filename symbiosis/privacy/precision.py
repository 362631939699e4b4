"""Whether products in fp32 have the precision of fp32 in this process.

Masked rows are hundreds of times as large as the bare rows. With the 10 bits of TF32, or the 7 of bf16, too little is
left of a result when the effect of the noise is subtracted.
"""

from __future__ import annotations

from functools import cache

import torch

from symbiosis.errors import PrivacyError

_LARGEST_ERROR = 1e-5
"""Relative error of a product: some 3e-7 in fp32, 4e-4 in TF32."""


def check_precision(device: torch.device, dtype: torch.dtype) -> None:
    """Raise a PrivacyError if this process has a device multiply fp32 in a lower precision."""
    if dtype is not torch.float32 or device.type not in ("cpu", "cuda"):
        return
    name = "mkldnn" if device.type == "cpu" else "cuda"
    setting = getattr(torch.backends, name).matmul.fp32_precision
    if setting not in ("none", "ieee") and not _is_exact(device, setting):
        raise PrivacyError(
            f"products in fp32 have a lower precision on {device} (torch.backends.{name}.matmul.fp32_precision is "
            f"{setting!r}), so results of masked rows would be wrong; set it to 'ieee'"
        )


@cache
def _is_exact(device: torch.device, setting: str) -> bool:
    """Return whether products are exact with a setting. Many CPUs multiply in fp32 whatever it is."""
    x, weight = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
    found = x.to(device).mm(weight.to(device)).cpu()
    exact = x.double().mm(weight.double())
    return bool((found - exact).norm() < _LARGEST_ERROR * exact.norm())
