"""Weights of a checkpoint in safetensors stay in its file, whose pages the system reads when it needs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from symbiosis.testing import tiny_model

SCRIPT = """
import asyncio, gc, json, sys, tempfile
import torch, transformers
import symbiosis

small, large = sys.argv[1:]

def anonymous():
    gc.collect()
    (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024

async def serve(folder, packed):
    executor = symbiosis.Executor.from_pretrained(folder, packed=packed)
    async with executor:
        with tempfile.TemporaryDirectory() as directory:
            await executor.listen(f"shm://{directory}/s", keep_weights=True)
            async with symbiosis.connect(f"shm://{directory}/s") as base, base.client() as client:
                await client.forward(input_ids=torch.tensor([[1, 2]]))
        return anonymous(), executor.sharing.served

found = {}
for packed in (False, True):
    before, _ = asyncio.run(serve(small, packed))  # everything is imported and has run once
    after, served = asyncio.run(serve(large, packed))
    found[str(packed)] = {"grown": after - before, "served": served}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    for name, options in (("small", {}), ("large", sizes)):
        tiny_model("llama", **options).save_pretrained(folder / name)
    return [str(folder / "small"), str(folder / "large")]


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell anonymous memory")
def test_memory_that_is_not_of_the_file(checkpoints: list[str]) -> None:
    """Anonymous memory grows by less than an eighth of the weights. Packed weights are a copy, so there it grows by all
    of them; this shows that the measurement finds copies."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *checkpoints]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    mapped, packed = found["False"], found["True"]
    assert mapped["served"] > 60 << 20
    assert mapped["grown"] < mapped["served"] / 8
    assert packed["grown"] > packed["served"] * 0.75
