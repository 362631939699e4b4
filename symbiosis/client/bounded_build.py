"""A limit of what a configuration may make transformers build.

A provider chooses the configuration. A count of layers that it does not serve would keep the client busy for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook

from symbiosis.errors import ShareError

LAYERS = 1000
"""Number of layers that a configuration may always name, whatever the share holds: some models use a layer again."""
LABELS = 1 << 20
"""Most labels of a configuration. transformers makes a name for each."""
MODULES = 100
"""A model may have ``MODULES * (names in its share + LAYERS)`` modules. Most modules have a parameter, and so a name in
the share."""


@contextlib.contextmanager
def bounded_build(config: Any, names: int) -> Iterator[None]:
    """Limit the model that this thread builds in the block, given how many names its share holds.

    Raises:
        ShareError: the configuration names more layers, or the model gets more modules.
    """
    _check_layers(config, max(names, LAYERS))
    thread, left = threading.get_ident(), MODULES * (names + LAYERS)

    def count(*_: object) -> None:
        nonlocal left
        if threading.get_ident() == thread:
            left -= 1
            if left < 0:
                raise ShareError(f"the executor's configuration makes too large a model for {names} tensors and layers")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _check_layers(config: Any, most: int) -> None:
    for name, value in config.items() if isinstance(config, Mapping) else ():
        if isinstance(value, Mapping):
            _check_layers(value, most)
        elif isinstance(value, int) and name == "num_labels" and value > LABELS:
            raise ShareError(f"the executor's configuration has num_labels {value}; {LABELS} are allowed")
        elif isinstance(value, int) and str(name).endswith(("layer", "layers")) and value > most:
            raise ShareError(f"the executor's configuration has {str(name)[:100]} {value}; its share allows {most}")
