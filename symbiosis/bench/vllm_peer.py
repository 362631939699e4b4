"""vLLM with as many LoRA adapters as clients, for comparison. It runs in a Python environment of its own.

``PYTHON vllm_peer.py OPTIONS``, with the Python of that environment, loads a model as OPTIONS (JSON) say. Then it
answers each line of standard input, JSON with ``prompts`` and ``tokens``, by the seconds that decoding took. That part
of this file imports nothing of symbiosis.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

KV_GIB = 1
"""Memory for vLLM's KV cache, in GiB."""
ENDS_S = 20
"""Seconds that vLLM has to end."""


class VllmProcess:
    """vLLM in another process, with one adapter for each prompt."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Return the seconds in which vLLM decodes ``tokens`` tokens after each prompt, without reading the prompts.

        Raises:
            UsageError: vLLM has failed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}).encode() + b"\n")
        return float(await self.reply())

    async def reply(self) -> str:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            from symbiosis.errors import UsageError

            said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise UsageError(f"vLLM ended with status {await self._process.wait()}: {''.join(said)[:500]}")
        return line.decode()


@contextlib.asynccontextmanager
async def vllm_process(
    python: str, base: Path, adapters: Sequence[Path], *, dtype: str, rank: int, length: int, eager: bool
) -> AsyncIterator[VllmProcess]:
    """Yield vLLM once it has loaded a model.

    Args:
        python: the Python interpreter of an environment with vLLM.
        base: folder of the model.
        adapters: folders of LoRA adapters, one for each prompt.
        dtype: such as ``"bfloat16"``.
        rank: largest rank of an adapter.
        length: largest number of tokens of a text.
        eager: without compiling the model.

    Raises:
        UsageError: there is no such interpreter, or vLLM does not start.
    """
    from symbiosis.bench.cores import usable_cores
    from symbiosis.errors import UsageError

    options = {
        "model": str(base),
        "dtype": dtype,
        "max_lora_rank": rank,
        "max_model_len": length,
        "enforce_eager": eager,
    }
    arguments = json.dumps({"adapters": [str(folder) for folder in adapters], "options": options})
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable_cores())),  # by default it leaves one core out
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.NamedTemporaryFile(prefix="symbiosis-vllm-") as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, __file__, arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"{python} cannot be run: {error.strerror}") from error
        assert process.stdin is not None
        try:
            vllm = VllmProcess(process, Path(log.name))
            await vllm.reply()
            yield vllm
        finally:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), ENDS_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it may have left processes of its own
            await process.wait()


def _main(arguments: str) -> None:
    del sys.path[0]  # this folder, whose modules have common names
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to standard output
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    given: dict[str, Any] = json.loads(arguments)
    adapters = [LoRARequest(folder, number + 1, folder) for number, folder in enumerate(given["adapters"])]
    llm = LLM(
        **given["options"],
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=len(adapters),
        max_num_seqs=len(adapters),
        enable_prefix_caching=False,
    )

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        llm.generate(inputs, sampling, lora_request=adapters[: len(prompts)], use_tqdm=False)
        return time.perf_counter() - began

    print("ready", file=out, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        alone = seconds(work["prompts"], 1)
        print(seconds(work["prompts"], 1 + work["tokens"]) - alone, file=out, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
