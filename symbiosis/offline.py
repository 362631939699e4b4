"""Block requests to a hub while a client builds an executor's model, or while an adapter of it is saved."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_lock = threading.Lock()


@contextlib.contextmanager
def without_hub() -> Iterator[None]:
    """Have ``huggingface_hub`` refuse every request, as with ``HF_HUB_OFFLINE=1``, while the block runs.

    Some configurations of transformers name another model, and transformers asks the hub for it. PEFT asks for the
    model itself under the name that the executor states. The setting is one for the whole process, so a download on
    another thread fails meanwhile.
    """
    from huggingface_hub import constants

    with _lock:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
