"""An executor and tenants in separate processes, for benchmarks over a transport.

``python -m symbiosis.bench.service serve ARGUMENTS`` serves a preset until its standard input ends. It answers ``gap``
with the largest gap of its event loop since the last such command, in milliseconds, and, with a policy
``recorded:NAME``, ``notes`` with the batches since the last time.

``python -m symbiosis.bench.service tenant ARGUMENTS`` is a tenant that follows commands on standard input. It has a
model and an adapter for each address. Arguments are a JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from symbiosis.bench.recorder import Measurements, WalkRecorder
from symbiosis.core.registry import make_policy
from symbiosis.core.requests import Key, Pass
from symbiosis.errors import SymbiosisError
from symbiosis.terminal.loop import run, wait_passively


@contextlib.contextmanager
def address_for(transport: str) -> Iterator[str]:
    """Yield a free address of a transport."""
    if transport == "shm":
        with tempfile.TemporaryDirectory(prefix="symbiosis-") as folder:
            yield f"shm://{folder}/executor.sock"
    else:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        yield f"{transport}://127.0.0.1:{port}"


def _command(role: str, **arguments: Any) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", __name__, role, json.dumps(arguments)]


RECORDED = "recorded:"
"""Before a policy, whose batches are to be recorded."""


class ServingProcess:
    """An executor in another process."""

    def __init__(self, address: str, process: subprocess.Popen[bytes]) -> None:
        self.address = address
        self.pid = process.pid
        self._process = process

    def gap_ms(self) -> float:
        """Return by how many milliseconds the executor's event loop was late, at most, since the last call."""
        return float(self._ask("gap"))

    def notes(self) -> Served:
        """Return the batches since the last call, of an executor with a policy ``recorded:NAME``."""
        found = json.loads(self._ask("notes"))
        for name in ("walk", "back"):
            found[name] = [_key(*key) for key in found[name]]
        found["batches"] = [(_key(*key), rows, seconds) for key, rows, seconds in found["batches"]]
        return Served(**found)

    def _ask(self, command: str) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()
        return self._process.stdout.readline()


class Served(NamedTuple):
    """What an executor has run."""

    walk: list[Key]
    """Keys of a token's walk."""
    back: list[Key]
    """Keys of the walk back of a training step."""
    batches: list[tuple[Key, int, float]]
    """Key, rows and seconds of each batch."""
    requests: int
    batches_s: float
    """Processor time of the executor while these batches ran, in seconds."""
    processor_s: float
    """Processor time of the executor since the notes before, in seconds."""


def _key(layers: list[int], pass_: int, *rest: Any) -> Key:
    return Key(tuple(layers), Pass(pass_), *rest)


@contextlib.contextmanager
def served(
    preset: str,
    transport: str,
    policy: str,
    base_layers: str,
    *,
    layers: str | None = None,
    shards: int = 1,
    packed: bool = True,
) -> Iterator[ServingProcess]:
    """Yield an executor in ``shards`` other processes that serves a preset's model, or ``layers`` of it, with weights
    that are packed or not.

    Raises:
        SymbiosisError: the executor did not start. The message is that of the error in its process, if there is one.
    """
    with address_for(transport) as address:
        options = {"base_layers": base_layers, "layers": layers, "packed": packed}
        command = _command("serve", preset=preset, address=address, policy=policy, shards=shards, options=options)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            if (line := process.stdout.readline()) != b"ready\n":
                said = (line + process.stdout.read()).decode().strip()
                raise SymbiosisError(said or f"the executor's process ended with status {process.wait()}")
            yield ServingProcess(address, process)
        finally:
            process.communicate()


async def answer(process: asyncio.subprocess.Process, command: str) -> float:
    """Write a command to a process's standard input, and return the number that it answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{command}\n".encode())
    await process.stdin.drain()
    if not (line := await process.stdout.readline()):
        raise RuntimeError(f"a process that is measured ended with status {await process.wait()}")
    return float(line)


class TenantProcess:
    """A tenant in another process. Its methods take the number of one of its addresses, and return its processor time
    in seconds."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def prefill(self, address: int = 0) -> float:
        """Run the prompt from an empty cache."""
        return await answer(self._process, f"prefill {address}")

    async def steps(self, count: int, address: int = 0) -> float:
        """Decode ``count`` tokens."""
        return await answer(self._process, f"steps {address} {count}")

    async def train(self, address: int = 0, steps: int = 1) -> float:
        """Run training steps."""
        return await answer(self._process, f"train {address} {steps}")

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


@contextlib.asynccontextmanager
async def tenant_processes(
    preset: str, addresses: Sequence[Sequence[str]], length: int | None = None, rows: int = 1
) -> AsyncIterator[list[TenantProcess]]:
    """Yield a tenant for each list of addresses, with an adapter for each address, for prompts and training batches of
    ``length`` tokens, or those of the preset. Each decodes ``rows`` texts at once."""
    pipe = asyncio.subprocess.PIPE
    commands = [
        _command("tenant", preset=preset, seed=seed, length=length, rows=rows, addresses=each)
        for seed, each in enumerate(addresses)
    ]
    tenants = [
        TenantProcess(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)) for command in commands
    ]
    try:
        await asyncio.gather(*(tenant.prefill() for tenant in tenants))
        yield tenants
    finally:
        await asyncio.gather(*(tenant.end() for tenant in tenants))


def _serve(preset: str, address: str, policy: str, shards: int, options: dict[str, Any]) -> None:
    import torch
    import transformers

    from symbiosis import Executor
    from symbiosis.bench.models import PRESETS, build

    async def main() -> None:
        model = _wire_model() if preset == "wire" else build(PRESETS[preset], torch.device("cpu"))
        recorded = policy.removeprefix(RECORDED)
        recorder = None if policy == recorded else WalkRecorder(make_policy(recorded))
        options["policy"] = recorder or policy
        if shards > 1:
            transformers.utils.logging.disable_progress_bar()
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                del model
                executor = Executor.from_pretrained(folder, shards=shards, **options)
        else:
            executor = Executor(model, **options)
        async with executor:
            trusting = {"insecure": True} if address.startswith("dist:") else {}
            await executor.listen(address, **trusting)
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            clock, watch = _Gaps(), None
            while command := await asyncio.to_thread(sys.stdin.readline):
                if recorder is not None and command == "notes\n":
                    sys.stdout.write(f"{json.dumps(_notes(recorder))}\n")
                else:
                    watch = watch or asyncio.create_task(clock.watch())  # its timer costs other benchmarks time
                    sys.stdout.write(f"{1e3 * clock.largest_s}\n")
                    clock.largest_s = 0.0
                sys.stdout.flush()
            if watch is not None:
                watch.cancel()

    run(main())


def _notes(recorder: WalkRecorder) -> dict[str, Any]:
    """Return the walks of a recorder and its batches, which it forgets."""
    notes, recorder.notes = recorder.notes, Measurements()
    batches = [(key, *point) for (key, _, _), points in notes.batches.items() for point in points]
    spent = recorder.notes.since_s - notes.since_s
    served = Served(recorder.walk, recorder.back, batches, notes.requests, notes.batches_s, spent)
    return served._asdict()


class _Gaps:
    """Measures by how much the event loop is late."""

    largest_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        due = 1e-3
        while True:
            began = time.perf_counter()
            await asyncio.sleep(due)
            self.largest_s = max(self.largest_s, time.perf_counter() - began - due)


def _wire_model() -> Any:
    """Return a model whose first layer, with 16 features, costs almost nothing."""
    from symbiosis.testing import tiny_model

    return tiny_model("llama", hidden_size=16, num_hidden_layers=1)


def _tenant(preset: str, seed: int, length: int | None, rows: int, addresses: list[str]) -> None:
    import torch
    from peft import get_peft_model

    from symbiosis import open_model
    from symbiosis.bench.jobs import Decoding, PlainJob
    from symbiosis.bench.models import PRESETS, lora

    torch.set_num_threads(1)  # single rows leave no work for a second thread
    size = PRESETS[preset]
    if length is not None:
        size = replace(size, prompt=length, batch=1, sequence=length)
    with contextlib.ExitStack() as stack:
        models = [get_peft_model(stack.enter_context(open_model(each)), lora()).eval() for each in addresses]
        decoding = [Decoding(each, size, torch.device("cpu"), seed, rows) for each in models]
        jobs = [PlainJob(each, size, torch.device("cpu"), seed) for each in models]
        for line in sys.stdin:
            command, number, *count = line.split()
            before = time.process_time()
            if command == "train":
                for _ in range(int(count[0])):
                    asyncio.run(jobs[int(number)].train())
            elif command == "prefill":
                decoding[int(number)].prefill()
            else:
                decoding[int(number)].steps(int(count[0]))
            sys.stdout.write(f"{time.process_time() - before}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the command closes their input, which ends them
    wait_passively()
    if sys.argv[1] == "serve":
        try:
            _serve(**json.loads(sys.argv[2]))
        except SymbiosisError as error:
            sys.stdout.write(f"{error}\n")  # in place of "ready", if the executor did not start
            sys.exit(1)
    else:
        _tenant(**json.loads(sys.argv[2]))
