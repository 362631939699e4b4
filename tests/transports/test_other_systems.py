"""Systems other than Linux, simulated: what Linux alone has is taken away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.errors import UsageError
from symbiosis.testing import tiny_model
from symbiosis.transports import share
from tests.helpers import in_thread
from tests.test_documentation import check_readme_example

WITHOUT = """
import importlib, os, pkgutil, socket, sys
import peft, torch, transformers
transformers.LlamaForCausalLM  # libraries look for the system in ways of their own
for name in ("fcntl", "resource"):  # Windows has neither
    sys.modules[name] = None
for name in ("memfd_create", "MFD_CLOEXEC", "register_at_fork"):
    delattr(os, name)
for name in ("SO_PEERCRED", "send_fds"):
    delattr(socket, name)
import symbiosis
for module in pkgutil.walk_packages(symbiosis.__path__, "symbiosis."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def test_all_modules_can_be_imported_and_the_readme_example_runs(tmp_path: Path) -> None:
    check_readme_example(tmp_path, after=WITHOUT)


async def test_tcp_needs_neither_memfd_nor_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the model arrives whole, and shm:// names tcp:// as the alternative."""
    base = tiny_model("llama", vocab_size=77)  # no other test has it: a process keeps a share while a model uses it
    copied = []
    tensors_in = share.tensors_in
    monkeypatch.setattr(share, "tensors_in", lambda *arguments: copied.append(arguments) or tensors_in(*arguments))
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(share, "OPEN_FILES", tmp_path)
    with pytest.raises(UsageError, match=r"needs Linux.*use tcp://"):
        make_transport("shm:///tmp/symbiosis.sock")
    ids = torch.arange(12).reshape(2, 6)
    expected = base(input_ids=ids).logits
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen("tcp://127.0.0.1:0")

        def logits() -> torch.Tensor:
            with symbiosis.open_model(listener.address) as model, torch.no_grad():
                result: torch.Tensor = model(input_ids=ids).logits
                return result

        torch.testing.assert_close(await in_thread(logits), expected)
    assert copied
