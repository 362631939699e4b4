"""DistributedDataParallel on two processes, each of which opens the model.

With an argument, the script is one of the processes and prints the losses of both as JSON, for each module that is
wrapped. The argument is a folder, for plain transformers + PEFT, or an executor's address.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import symbiosis
from tests.ecosystem.common import report
from tests.service import Service, save_model


@contextlib.contextmanager
def opened(model: str) -> Iterator[Any]:
    if "://" in model:
        with symbiosis.open_model(model) as found:
            yield found
    else:
        yield AutoModelForCausalLM.from_pretrained(model)


class Around(torch.nn.Module):
    """A module that has the model, as a LightningModule has."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM"))

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def added(base: Any) -> Any:
    """Return the model with an adapter of transformers' own integration of PEFT."""
    base.add_adapter(LoraConfig(r=4))
    return base


def train(name: str) -> None:
    """Train as one of the processes."""
    dist.init_process_group("gloo")
    found = [trained(name, wrapped) for wrapped in (lambda base: Around(base).model, Around, added)]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # freeing the model may hang in torch 2.13: it joins gloo's thread, which waits for the GIL


def trained(name: str, wrapped: Callable[[Any], Any]) -> list[Any]:
    """Return the losses of all processes for what a function makes of the model."""
    rank = dist.get_rank()
    with opened(name) as base:
        torch.manual_seed(rank)  # DistributedDataParallel makes the adapters equal
        model = DistributedDataParallel(wrapped(base))
        assert not getattr(model.module, "_ddp_params_and_buffers_to_ignore", [])  # later weights are the tenant's own
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for step in range(4):
            ids = (torch.arange(16).view(2, 8) * (2 * step + rank + 1)) % 60 + 3
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses)
    return every


def losses(name: str) -> list[list[list[float]]]:
    """Return the losses of both processes for each module."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryFile() as output:  # a process that is left behind would keep a pipe open
        subprocess.run([*run, "-m", "tests.ecosystem.ddp", name], check=True, stdout=output, timeout=100)
        output.seek(0)
        found: list[list[list[float]]] = json.loads(output.read().splitlines()[-1])
    assert [len(each) for each in found] == [2, 2, 2]
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        checkpoint = save_model(Path(name) / "model")
        with Service(checkpoint, f"shm://{name}/s.sock", fresh=True) as service:
            found, expected = losses(service.address), losses(str(checkpoint))
    report("torch", "DistributedDataParallel", {"losses": found}, {"losses": expected})


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
