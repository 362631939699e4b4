"""DistributedDataParallel: ``torchrun --nproc-per-node 2 tests/ecosystem/ddp.py MODEL`` prints losses as JSON.

MODEL is a folder, for plain transformers + PEFT, or an executor's address.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import symbiosis


@contextlib.contextmanager
def opened(model: str) -> Iterator[Any]:
    if "://" in model:
        with symbiosis.open_model(model) as found:
            yield found
    else:
        yield AutoModelForCausalLM.from_pretrained(model)


def main(name: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with opened(name) as base:
        torch.manual_seed(rank)  # DistributedDataParallel makes the adapters equal
        model = DistributedDataParallel(get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM")))
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
    if rank == 0:
        print(json.dumps(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
