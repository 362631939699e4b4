"""symbiosis: one frozen base model, many tenants who fine-tune and serve their own PEFT adapters on it at once."""

from typing import TYPE_CHECKING, Any

from symbiosis._version import __version__

if TYPE_CHECKING:
    from symbiosis.client.client import Client
    from symbiosis.client.connect import Base, connect
    from symbiosis.client.open_model import backward_in_windows, open_model
    from symbiosis.executor.statistics import Statistics
    from symbiosis.host import Executor

__all__ = ["Base", "Client", "Executor", "Statistics", "__version__", "backward_in_windows", "connect", "open_model"]

_HOMES = {
    "Base": "symbiosis.client.connect",
    "Client": "symbiosis.client.client",
    "Executor": "symbiosis.host",
    "Statistics": "symbiosis.executor.statistics",
    "backward_in_windows": "symbiosis.client.open_model",
    "connect": "symbiosis.client.connect",
    "open_model": "symbiosis.client.open_model",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers when they are first needed, so that ``symbiosis --help`` is quick."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
