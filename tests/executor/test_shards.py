"""A base model in several processes, against plain transformers + PEFT, and what happens when one of them ends."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.core.requests import Batch, Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import ShardLostError, SplitError, UsageError
from symbiosis.executor import shard_group
from symbiosis.executor.launch import Launch, ShardSettings
from symbiosis.executor.parts import Cut
from symbiosis.executor.shard_group import ShardGroup
from symbiosis.executor.shards import Shards, work
from symbiosis.executor.splitting import SplitModel
from symbiosis.testing import Job, run_job, run_job_plain
from symbiosis.testing.zoo import zoo_model
from tests.helpers import IDS, METHODS, adamw, assert_close, command, ia3, lora, losses, until
from tests.service import Service, free_port, save_model

JOB = Job(steps=4, new_tokens=4)


def saved(folder: Path, name: str = "LlamaForCausalLM", **options: Any) -> tuple[Path, Any]:
    """Return a checkpoint, and a function that loads it plainly."""
    model = zoo_model(name, **options)
    model.save_pretrained(folder / "model")
    return folder / "model", lambda: type(model).from_pretrained(folder / "model")


@pytest.mark.parametrize(
    ("name", "count", "method"),
    [
        ("LlamaForCausalLM", 2, lora),
        pytest.param("GPT2LMHeadModel", 2, lambda: ia3("gpt2"), marks=pytest.mark.thorough),  # one more process each
        ("MixtralForCausalLM", 2, METHODS["prefix"]),
        pytest.param(  # its shared expert has a gate of one output
            *("Qwen2MoeForCausalLM", 2, lambda: lora(target_modules=["q_proj", "v_proj"])),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *("Qwen3MoeForCausalLM", 4, lambda: lora(target_modules=["q_proj", "v_proj"])),
            marks=pytest.mark.thorough,  # three processes more
        ),
    ],
)
async def test_plain_pefts_numbers(name: str, count: int, method: Any, tmp_path: Path) -> None:
    """In process and from other processes, with masked rows too, several tenants at once."""
    checkpoint, load = saved(tmp_path, name)
    expected = run_job_plain(load(), method(), JOB)
    async with symbiosis.Executor.from_pretrained(checkpoint, shards=count) as executor:
        shm, tcp = f"shm://{tmp_path}/s", "tcp://127.0.0.1:0"
        tcp = [await executor.listen(address) for address in (shm, tcp)][1].address
        async with (
            symbiosis.connect(shm) as near,
            symbiosis.connect(tcp) as far,
            executor.client(method(), seed=0) as one,
            near.client(method(), seed=0) as two,
            far.client(method(), seed=0) as three,
        ):
            jobs = [asyncio.create_task(run_job(client, JOB)) for client in (one, two, three)]
            for job in jobs:
                assert_close(await job, expected)
        if name == "LlamaForCausalLM":
            async with symbiosis.connect(shm) as near, near.client(method(), seed=0, privacy="noise-pool") as masked:
                logits = (await masked.forward(input_ids=IDS)).logits
            torch.manual_seed(0)
            plain = get_peft_model(load(), method()).eval()
            torch.testing.assert_close(logits, plain(input_ids=IDS).logits, rtol=1e-3, atol=1e-3)
        assert executor.statistics().mean_batch > 1


@pytest.mark.thorough
async def test_it_is_the_same_model_as_that_of_a_whole_executor(tmp_path: Path) -> None:
    """So that they can be each other's replicas; also in another precision than the checkpoint's."""
    checkpoint, _ = saved(tmp_path)
    for dtype in (None, "bf16"):
        whole = symbiosis.Executor.from_pretrained(checkpoint, dtype=dtype)
        async with symbiosis.Executor.from_pretrained(checkpoint, dtype=dtype, shards=2) as divided:
            assert divided.layers == whole.layers
            assert divided.sharing == whole.sharing
            assert divided.service.share().description == whole.service.share().description
            assert divided.service.identity().weights == whole.service.identity().weights


@pytest.mark.thorough
async def test_a_call_may_name_any_number_of_siblings(tmp_path: Path) -> None:
    """A header has room for a limited number of layers."""
    checkpoint, _ = saved(tmp_path, num_hidden_layers=13)
    whole = symbiosis.Executor.from_pretrained(checkpoint, packed=False)
    layers = tuple(spec.layer for spec in whole.layers if spec.in_features == 32)
    assert len(layers) > 64
    key, x = Key(layers, Pass.FORWARD), torch.randn(3, 32)
    wanted = whole.engine.runner.run_alone(Call(key, Kind.PREFILL, (x,)))
    async with symbiosis.Executor.from_pretrained(checkpoint, shards=2) as executor:
        session = executor.service.join("one")
        session.begin_walk()
        found = await session.submit(Call(key, Kind.PREFILL, (x,)))
        session.close()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough  # four processes that import torch
async def test_an_executor_ends_with_its_shards(tmp_path: Path) -> None:
    """Clients of this process get the reason, and so does who waits for the executor. No process is left."""
    checkpoint, _ = saved(tmp_path)
    before = set(psutil.Process().children())
    executor = symbiosis.Executor.from_pretrained(checkpoint, shards=3)
    async with executor, executor.client(lora(), seed=0) as client:
        first, second = sorted(set(psutil.Process().children()) - before, key=lambda process: process.pid)
        optimizer = adamw(client.model)

        async def train() -> None:
            while True:
                await client.train_step({"input_ids": IDS, "labels": IDS}, optimizer)

        job = asyncio.create_task(train())
        await until(lambda: executor.statistics().requests > 50)
        second.kill()
        began = time.monotonic()
        with pytest.raises(ShardLostError, match=rf"shard 2 of 3 \(process {second.pid}\) was ended by signal 9"):
            await asyncio.wait_for(executor.wait_closed(), 10)
        with pytest.raises(ShardLostError, match="shard 2 of 3"):
            await asyncio.wait_for(job, 10)
        assert time.monotonic() - began < 10
        assert not first.is_running()


async def test_the_error_of_a_lost_shard_holds_no_rows(base: Any) -> None:
    """All tenants get it, and a traceback's frames hold the rows of its batch."""
    async with symbiosis.Executor(base) as executor:
        try:
            raise ShardLostError("shard 1 of 2 is lost") from RuntimeError("closed")
        except ShardLostError as lost:
            error = lost
        executor.engine._answer_failed(Batch(Key((0,), Pass.FORWARD), (), "", 0), error)
        assert error.__cause__ is not None
        assert error.__traceback__ is error.__cause__.__traceback__ is None


async def test_an_idle_executor_ends_with_its_shards(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path)
    before = set(psutil.Process().children())
    async with symbiosis.Executor.from_pretrained(checkpoint, shards=2) as executor:
        (other,) = set(psutil.Process().children()) - before
        other.kill()
        with pytest.raises(ShardLostError, match="shard 1 of 2"):
            await asyncio.wait_for(executor.wait_closed(), 10)


@pytest.mark.thorough
def test_a_tenant_goes_on_at_a_replica_when_a_shard_ends(tmp_path: Path) -> None:
    """In the middle of a step; the losses are those of an undisturbed run. The command names the shard, and exits."""
    checkpoint = save_model(tmp_path / "model", num_hidden_layers=2)
    near, far = f"shm://{tmp_path}/one.sock", f"tcp://127.0.0.1:{free_port()}"

    def train(at: int, then: Any = None) -> list[float]:
        with symbiosis.open_model(f"{near},{far}", retry=30) as model:
            torch.manual_seed(0)
            return losses(get_peft_model(model, lora()), 6, at, then)

    with Service(checkpoint, near, "--shards", "2", fresh=True) as divided, Service(checkpoint, far):
        (shard,) = psutil.Process(divided.pid).children()

        def kill() -> None:
            shard.kill()
            assert divided.wait(10) == 1

        undisturbed = train(-1)
        assert train(3, kill) == pytest.approx(undisturbed, rel=1e-5)
        assert f"shard 1 of 2 (process {shard.pid}) was ended by signal 9" in divided.log


@pytest.mark.thorough
def test_shards_end_with_the_first(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "model", num_hidden_layers=1)
    with Service(checkpoint, f"shm://{tmp_path}/one.sock", "--shards", "2", fresh=True) as divided:
        (shard,) = psutil.Process(divided.pid).children()
        divided.kill()
        assert not psutil.wait_procs([shard], 10)[1]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is shared on Linux alone")
async def test_rows_go_through_shared_memory(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path)
    before = set(psutil.Process().children())
    async with symbiosis.Executor.from_pretrained(checkpoint, shards=2) as executor, executor.client() as client:
        (shard,) = set(psutil.Process().children()) - before
        await client.forward(input_ids=IDS)
        (memory,) = [each for each in shard.memory_maps() if "symbiosis-shards" in each.path]
        assert memory.rss > 0


async def test_shards_end_when_the_executor_closes(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path)
    before, threads = set(psutil.Process().children()), torch.get_num_threads()
    async with symbiosis.Executor.from_pretrained(checkpoint, shards=2) as executor:
        (shard,) = set(psutil.Process().children()) - before
        (process,) = executor._shards._processes.values()  # type: ignore[union-attr]
    assert not shard.is_running()
    assert process.returncode == 0, "it is told to end, and not killed"
    assert torch.get_num_threads() == threads


@pytest.mark.thorough  # four processes that import torch, beside those of torchrun
def test_processes_of_torchrun(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "model", num_hidden_layers=1)
    address = f"shm://{tmp_path}/one.sock"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    with Service(checkpoint, address, "--shards", "2", launcher=torchrun) as service:
        with symbiosis.open_model(address) as model:
            plain = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
            torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-5)
        processes = psutil.Process(service.pid).children(recursive=True)
        service.stop()
        assert not psutil.wait_procs(processes, 20)[1]


@pytest.mark.thorough  # four processes that import torch
async def test_each_process_has_its_part_of_the_weights(tmp_path: Path) -> None:
    """Of a checkpoint that is loaded in another precision, so nothing of it stays mapped from the file."""
    checkpoint, load = saved(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    load().to(torch.bfloat16).save_pretrained(checkpoint)
    before = set(psutil.Process().children())
    async with symbiosis.Executor.from_pretrained(checkpoint, dtype="fp32", shards=2) as executor:
        (other,) = set(psutil.Process().children()) - before
        with_weights = anonymous(other.pid)
        served = executor.sharing.served
    checkpoint, _ = saved(tmp_path / "small")
    async with symbiosis.Executor.from_pretrained(checkpoint, shards=2):
        (other,) = set(psutil.Process().children()) - before
        without = anonymous(other.pid)
    assert served > 60 << 20
    assert 0.45 * served < with_weights - without < 1.15 / 2 * served + (8 << 20)


def anonymous(pid: int) -> int:
    """Return the bytes of memory of a process that no file has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def test_a_shard_with_other_weights_is_refused(tmp_path: Path) -> None:
    """The second process loads what the folder has by then."""
    checkpoint, _ = saved(tmp_path)
    launch = Launch(2, ShardSettings(str(checkpoint), None, {}, None, "cpu"))
    try:
        model = launch.settings.load()
        with torch.no_grad():
            model.lm_head.weight += 1
        model.save_pretrained(checkpoint)
        with pytest.raises(SplitError, match="shard 1 of 2 has loaded other weights"):
            divided_by_hand(saved(tmp_path / "other")[1](), launch)
    finally:
        launch.close()


def divided_by_hand(model: Any, launch: Any) -> None:
    Shards(SplitModel(model, shard=(0, launch.count)), launch)


def test_shards_exchange_a_message_before_they_have_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects two shards at their first message, by the store, which they leave then."""
    sent = []

    class Noting:
        def __init__(self, group: Any) -> None:
            self.recv = group.recv
            self.send = lambda tensors, *to: sent.append(to) or group.send(tensors, *to)

    make = shard_group.gloo
    monkeypatch.setattr(shard_group, "gloo", lambda *arguments: Noting(make(*arguments)))

    def meet(rank: int) -> ShardGroup:
        store = dist.FileStore(str(tmp_path / "store"), 3)
        return ShardGroup(store, rank, 3, "127.0.0.1", torch.device("cpu"), {})

    with ThreadPoolExecutor() as threads:
        assert [group.rank for group in threads.map(meet, range(3))] == [0, 1, 2]
    assert sent == [(1, shard_group._ROWS), (2, shard_group._ROWS)]


class Meeting:
    """Stands for a launch of two shards in two threads of this process; the second one's first batch fails."""

    count, closed = 2, False
    processes: ClassVar[dict[int, Any]] = {}

    def __init__(self, folder: Path, load: Any, shared: torch.Tensor | None) -> None:
        self._folder, self._load = folder, load
        self._memory = {} if shared is None else {0: shared, 1: shared}
        self.other = threading.Thread(target=self._work, daemon=True)
        self.other.start()

    def _group(self, rank: int) -> ShardGroup:
        store = dist.FileStore(str(self._folder / "store"), 2)
        return ShardGroup(store, rank, 2, "127.0.0.1", torch.device("cpu"), self._memory)

    def _work(self) -> None:
        work(self._group(1), self)  # type: ignore[arg-type]

    def split(self, names: list[str], rank: int, count: int) -> SplitModel:
        split = SplitModel(self._load(), names, shard=(rank, count))
        first, run = split.parts[0], split.parts[0].run

        def fail(key: Key, tensors: Any) -> Any:
            first.run = run  # type: ignore[method-assign]
            raise MemoryError

        first.run = fail  # type: ignore[method-assign]
        return split

    def meet(self, then: Any) -> ShardGroup:
        group = self._group(0)
        then(group)
        return group

    def forget(self) -> None:
        pass

    def close(self, at_once: bool) -> None:
        assert not at_once
        self.other.join(10)


def no_memory(*args: object) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("bytes_", [None, 1 << 10, 1 << 20], ids=["no shared memory", "too little", "enough"])
def test_a_batch_that_fails_at_one_shard_is_that_batch_alone(
    bytes_: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, load = saved(tmp_path)
    shared, rows = None if bytes_ is None else torch.zeros(bytes_, dtype=torch.uint8), 30
    launch = Meeting(tmp_path, load, shared)
    split = SplitModel(load(), shard=(0, 2))
    shards = Shards(split, launch)  # type: ignore[arg-type]
    weight = load().model.layers[0].self_attn.q_proj.weight
    x, dy = torch.randn(rows, weight.shape[1]), torch.randn(rows, weight.shape[0])
    with pytest.raises(RuntimeError, match="shard 1 of 2 did not compute its part"):
        shards.run(Key((0,), Pass.FORWARD), (x,))
    with monkeypatch.context() as lacking:
        lacking.setattr(Cut, "call", no_memory)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            shards.run(Key((0,), Pass.FORWARD), (x,))
    assert shards.error is None
    for pass_, given, expected in ((Pass.FORWARD, x, x @ weight.T), (Pass.BACKWARD, dy, dy @ weight)):
        (found,) = shards.run(Key((0,), pass_), (given,))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert shared is None or shared.any() == (bytes_ == 1 << 20)  # matrices were there, or in messages
    shards.close()
    assert not launch.other.is_alive()


async def test_a_shard_that_ends_before_the_executor_opens(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path)
    before = set(psutil.Process().children())
    executor = symbiosis.Executor.from_pretrained(checkpoint, shards=2)
    (other,) = set(psutil.Process().children()) - before
    other.kill()
    await asyncio.sleep(0.5)
    async with executor:
        with pytest.raises(ShardLostError, match="shard 1 of 2"):
            await asyncio.wait_for(executor.wait_closed(), 10)


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"shards": 0}, UsageError, "shards is 0; give a whole number: 2 or more, or 1 for"),
        ({"shards": 200}, SplitError, "cannot be divided into 200 parts"),
        ({"shards": 2, "base_layers": "mlp"}, SplitError, "cannot be divided among shards"),
        ({"shards": 2, "allow_weights": ["lm_head"]}, UsageError, "leave out layers and shards"),
        ({"shards": 2, "config": {1}}, UsageError, "shards are processes of their own"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], error: type[Exception], complaint: str, tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path)
    before = set(psutil.Process().children())
    threads = torch.get_num_threads()
    with pytest.raises(error, match=complaint):
        symbiosis.Executor.from_pretrained(checkpoint, **options)
    assert set(psutil.Process().children()) == before
    assert torch.get_num_threads() == threads


def test_torchrun_with_another_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = saved(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = command("serve", str(checkpoint), "--listen", f"shm://{tmp_path}/s", "--shards", "2")
    assert result.exit_code == 1
    assert "torchrun has started 4 processes for 2 shards" in " ".join(result.output.split())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"call Executor\.run_shard here"):
        symbiosis.Executor.from_pretrained(checkpoint, shards=2)
    monkeypatch.delenv("RANK")
    with pytest.raises(UsageError, match=r"call Executor\.from_pretrained here"):
        symbiosis.Executor.run_shard(checkpoint, shards=2)
