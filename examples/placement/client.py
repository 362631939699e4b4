"""Train a LoRA on a model that several executors serve: ``python examples/placement/client.py ADDRESSES [STEPS]``.

Prints the loss of each step, and at the end how many requests each executor has served. When an executor is lost,
training goes on at a replica of it, or waits until it is back.
"""

from __future__ import annotations

import sys
import time

import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.core.registry import make_transport


def main(addresses: str, steps: int) -> None:
    with symbiosis.open_model(addresses) as base:
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
        ids = torch.randint(0, base.config.vocab_size, (4, 32))
        for step in range(steps):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
            time.sleep(0.2)
    for address, state in make_transport(addresses).look(addresses).status["replicas"].items():
        print(f"{address}: {state.get('error') or '{:,} requests'.format(state['requests'])}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/placement/client.py ADDRESSES [STEPS]")
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 30)
