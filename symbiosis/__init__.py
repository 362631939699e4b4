"""symbiosis: one frozen base model, many tenants who fine-tune and serve their own adapters on it at once."""

from symbiosis._version import __version__
from symbiosis.core.client import Client
from symbiosis.core.executor import Executor

__all__ = ["Client", "Executor", "__version__"]
