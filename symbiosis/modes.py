"""torch's per-thread modes, taken off a thread and put back.

Clients share the event loop's thread, so the modes of one client must not reach another client, or the executor. A mode
is a grad, inference, autocast or forward-AD mode, a function or dispatch mode, or a saved-tensor hook. The device of
``torch.set_default_device`` belongs to the process, and is not taken off. The module also checks that a device exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

from symbiosis.errors import UsageError

_engine: Any = torch._C._autograd


def in_modes() -> bool:
    """Return whether this thread is in any torch mode other than the grad mode."""
    return bool(
        torch.is_inference_mode_enabled()
        or _in_autocast()
        or (torch._C._len_torch_function_stack() and any(mode is not _default_device() for mode in _function_modes()))
        or torch._C._len_torch_dispatch_stack()
        or _engine._top_saved_tensors_default_hooks(False) is not None
        or not _engine._saved_tensors_hooks_is_enabled()
        or not torch._C._is_fwd_grad_enabled()  # in the forward of a torch.autograd.Function
    )


def _in_autocast() -> bool:
    nesting = torch.autocast_increment_nesting() - 1  # also counts contexts that disable it
    torch.autocast_decrement_nesting()
    return nesting > 0 or torch._C._is_any_autocast_enabled()


class Modes:
    """torch's modes of a suspended fiber, except the grad mode, which callers handle because it is so common."""

    __slots__ = (
        *("_autocast", "_caches", "_dispatch", "_forward_ad", "_function"),
        *("_hooks", "_inference", "_nesting", "_no_hooks"),
    )

    def __init__(self) -> None:
        """Take the modes off this thread and leave torch's defaults."""
        # When the guard exits, it restores exactly the state that it found.
        self._inference = torch._C._InferenceMode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()  # type: ignore[no-untyped-call]
        self._forward_ad = torch._C._is_fwd_grad_enabled()
        torch._C._set_fwd_grad_enabled(True)
        self._autocast: list[tuple[str, bool, torch.dtype]] = []
        self._nesting = 0
        if _in_autocast():
            self._park_autocast()
        self._hooks: list[Any] = []
        while (hooks := _engine._top_saved_tensors_default_hooks(False)) is not None:
            self._hooks.append(hooks)
            _engine._pop_saved_tensors_default_hooks()
        self._no_hooks: str | None = _engine._saved_tensors_hooks_get_disabled_error_message()
        if self._no_hooks is not None:
            _engine._saved_tensors_hooks_enable()
        kept = _default_device()
        function = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
        self._function: list[Any] = [mode for mode in function if mode is not kept]
        if len(self._function) < len(function):
            torch._C._push_on_torch_function_stack(kept)
        self._dispatch: list[Any] = [dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]

    def _park_autocast(self) -> None:
        for device, default in _AUTOCAST_DTYPES.items():
            self._autocast.append((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, default)
        self._caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(True)
        # Autocast caches casts of weights until the outermost context exits. Another tenant's contexts must not keep
        # this cache alive beyond an optimizer step, so each suspension counts as an exit.
        self._nesting = torch.autocast_increment_nesting() - 1
        for _ in range(self._nesting + 1):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()

    def restore(self) -> None:
        """Put the modes back on this thread, which must be in torch's defaults."""
        for mode in reversed(self._dispatch):
            dispatch._push_mode(mode)
        for mode in reversed(self._function):
            torch._C._push_on_torch_function_stack(mode)
        for pack, unpack in reversed(self._hooks):
            _engine._push_saved_tensors_default_hooks(pack, unpack)
        if self._no_hooks is not None:
            _engine._saved_tensors_hooks_disable(self._no_hooks)
        for device, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(self._caches)
        for _ in range(self._nesting):
            torch.autocast_increment_nesting()
        torch._C._set_fwd_grad_enabled(self._forward_ad)
        if self._inference is not None:
            self._inference.__exit__(None, None, None)


def check_device(device: str | torch.device | None) -> None:
    """Raise UsageError if this machine does not have the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that there is CUDA
        raise UsageError(
            f"device is {str(device)!r}, which this machine does not have; name one such as 'cpu' ({error})"
        ) from error


def _default_device() -> Any:
    """Return the function mode that ``torch.set_default_device`` has put on this thread, or None."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


_set_grad_enabled = torch._C._set_grad_enabled
_AUTOCAST_DTYPES = {
    device: torch.get_autocast_dtype(device) for device in ("cpu", *["cuda"] * torch.cuda.is_available())
}
"""torch's defaults: a context without a dtype takes what the thread has."""


@contextlib.contextmanager
def modes_aside() -> Iterator[None]:
    """Put torch's modes aside meanwhile. For an ``await`` outside fibers, when other coroutines use this thread."""
    grad = torch.is_grad_enabled()
    modes = Modes() if in_modes() else None
    _set_grad_enabled(True)
    try:
        yield
    finally:
        if modes is not None:
            modes.restore()
        _set_grad_enabled(grad)


def no_modes() -> contextlib.AbstractContextManager[None]:
    """Put torch's modes aside meanwhile, if this thread is in any. For callbacks of an event loop: a coroutine may hold
    modes while it waits, and they must not reach the tensors of others."""
    return modes_aside() if in_modes() else contextlib.nullcontext()
