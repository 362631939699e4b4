"""Masked clients over every transport, in synchronous code, with executors that end, and on the command line."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

import symbiosis
from symbiosis.core.requests import Call, Pass
from symbiosis.errors import ClientClosedError, PrivacyError, UsageError
from symbiosis.privacy import LocalPads, NoisePool, SecretShares, Seen, Wiretap
from symbiosis.privacy.local_pads import Pads
from symbiosis.privacy.masks import MaskedRows
from symbiosis.privacy.secret_shares import Shares
from symbiosis.testing import Comparison, Job, run_job, run_job_plain, tiny_model
from symbiosis.transports.keys import SERVER, new_key
from tests.helpers import IDS, command, in_thread, lora, restart, run_command, until
from tests.service import Service, free_port, save_model

SCHEMES = ("noise-pool", "local-pads", "secret-shares")
ALL = pytest.mark.parametrize("name", SCHEMES)
SCALE = 16.0
POOL = 5
"""Vectors of a noise pool."""
JOB = Job(new_tokens=0, steps=8)
WITHIN = 1e-3
"""Relative tolerance. Noise differs between runs here, and the adapter differs more after steps of AdamW."""


def scheme(name: str, model: Any, other: str = "", **options: Any) -> Any:
    makers: dict[str, Callable[..., Any]] = {
        "noise-pool": lambda **options: NoisePool(size=POOL, refresh=40, **options),
        "local-pads": lambda **options: LocalPads(model, **{"rows": 8, **options}),
        "secret-shares": lambda **options: SecretShares(with_=other, **options),
    }
    return makers[name](scale=SCALE, **options)


def assert_near(comparison: Comparison) -> None:
    assert comparison.worst("logits") <= WITHIN, comparison
    assert comparison.worst("gradient") <= WITHIN, comparison
    assert comparison.worst("losses") <= WITHIN, comparison


def address_of(transport: str, folder: Path) -> str:
    return f"shm://{folder}/socket" if transport == "shm" else f"{transport}://127.0.0.1:{free_port()}"


def insecure(transport: str) -> dict[str, Any]:
    return {"insecure": True} if transport == "dist" else {}


@ALL
@pytest.mark.parametrize("transport", ["shm", "tcp", "dist"])
async def test_every_transport(transport: str, name: str, tmp_path: Path) -> None:
    """Masked clients agree with plain PEFT over each transport, with coroutines and with synchronous code."""
    base = tiny_model("gpt2")
    expected = run_job_plain(base, lora("gpt2"), JOB)
    addresses = []
    async with contextlib.AsyncExitStack() as stack:
        for number in ("one", "two")[: 1 + (name == "secret-shares")]:
            executor = await stack.enter_async_context(symbiosis.Executor(copy.deepcopy(base)))
            folder = tmp_path / number
            folder.mkdir()
            address = address_of(transport, folder)
            await executor.listen(address, **insecure(transport))
            addresses.append(address)
        own = {"options": insecure(transport)} if name == "secret-shares" else {}
        options = {"privacy": scheme(name, base, addresses[-1], **own), **insecure(transport)}
        async with symbiosis.connect(addresses[0], **options) as remote:
            async with remote.client(lora("gpt2"), seed=0) as client:
                assert_near(Comparison.of(await run_job(client, JOB), expected))

        def tenant() -> Any:
            with symbiosis.open_model(addresses[0], **options) as model:
                return run_job_plain(model, lora("gpt2"), JOB)

        if transport != "dist" or name == "noise-pool":
            assert_near(Comparison.of(await in_thread(tenant), expected))


async def test_two_providers_with_keys_of_their_own(base: Any, tmp_path: Path) -> None:
    """Each provider knows the tenant by another key, which names that provider's server."""
    folders = [tmp_path / "one", tmp_path / "two"]
    secrets = []
    for folder in folders:
        new_key(folder, SERVER)
        secrets.append(new_key(folder, "alice"))
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for folder in folders:
            executor = await stack.enter_async_context(symbiosis.Executor(copy.deepcopy(base)))
            addresses.append((await executor.listen("tcp://127.0.0.1:0", keys=folder)).address)
        spec = f"secret-shares:with={addresses[1]},options.key={secrets[1]}"
        async with symbiosis.connect(addresses[0], key=secrets[0], privacy=spec) as remote, remote.client() as client:
            logits = (await client.forward(input_ids=IDS)).logits
        with torch.no_grad():
            torch.testing.assert_close(logits, base(IDS).logits, rtol=1e-2, atol=1e-3)

        def tenant() -> None:
            shares = SecretShares(addresses[1], options={"key": secrets[1]})
            with symbiosis.open_model(addresses[0], key=secrets[0], privacy=shares) as model:
                model(IDS)
            with pytest.raises(UsageError, match="has no option lock"):
                with symbiosis.open_model(addresses[0], key=secrets[0], privacy=f"{spec},options.lock=5"):
                    pass

        await in_thread(tenant)


@ALL
async def test_synchronous_code_can_precompute(name: str, base: Any) -> None:
    addresses = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(1 + (name == "secret-shares")):
            executor = await stack.enter_async_context(symbiosis.Executor(copy.deepcopy(base)))
            addresses.append((await executor.listen("tcp://127.0.0.1:0")).address)
        options = {"rows": IDS.numel(), "when_out": "error"} if name == "local-pads" else {}

        def tenant() -> None:
            with symbiosis.open_model(addresses[0], privacy=scheme(name, base, addresses[-1], **options)) as opened:
                model = get_peft_model(opened, lora(lora_dropout=0.0))
                model.precompute()
                model(IDS, labels=IDS).loss.backward()
            with pytest.raises(ClientClosedError, match="was closed"):
                model.precompute()
            with symbiosis.open_model(addresses[0]) as model:
                model.precompute()  # has no effect

        await in_thread(tenant)


async def test_precompute_beside_a_forward_pass(base: Any) -> None:
    """Only the walk of ``precompute()`` gets zeros for results, and not a walk on another thread at the same time."""
    async with symbiosis.Executor(copy.deepcopy(base)) as executor:
        address = (await executor.listen("tcp://127.0.0.1:0")).address

        def tenant() -> None:
            with symbiosis.open_model(address, privacy=scheme("local-pads", base, address)) as model, torch.no_grad():
                alone = model(IDS).logits
                beside: list[torch.Tensor] = []

                def walk() -> None:
                    with torch.no_grad():
                        beside.append(model(IDS).logits)

                def in_the_middle(*_: Any) -> None:
                    if threading.current_thread() is here:
                        thread = threading.Thread(target=walk)
                        thread.start()
                        thread.join()

                here = threading.current_thread()
                model.model.layers[0].register_forward_pre_hook(in_the_middle)
                model.precompute()
                torch.testing.assert_close(beside[0], alone, rtol=1e-2, atol=1e-3)

        await in_thread(tenant)


@pytest.mark.parametrize("synchronous", [False, True], ids=["coroutines", "synchronous"])
async def test_precompute_draws_no_random_numbers(synchronous: bool, base: Any) -> None:
    """Dropout is the same with precomputation and without."""
    config = lora(lora_dropout=0.3)

    def synchronous_tenant(address: str, ready: bool) -> list[float]:
        with symbiosis.open_model(address, privacy=LocalPads(base, rows=8, scale=SCALE)) as opened:
            torch.manual_seed(0)
            model = get_peft_model(opened, copy.deepcopy(config)).train()
            if ready:
                opened.precompute()
            with torch.no_grad():
                return [model(IDS, labels=IDS).loss.item() for _ in range(2)] + [torch.rand(()).item()]

    async def tenant(executor: symbiosis.Executor, ready: bool) -> list[float]:
        async with executor.client(
            copy.deepcopy(config), seed=0, privacy=LocalPads(base, rows=8, scale=SCALE)
        ) as client:
            client.model.train()
            if ready:
                await client.precompute()
            with torch.no_grad():
                losses = [(await client.forward(input_ids=IDS, labels=IDS)).loss.item() for _ in range(2)]
            return [*losses, (await client.run(torch.rand, ())).item()]

    async with symbiosis.Executor(copy.deepcopy(base)) as executor:
        address = (await executor.listen("tcp://127.0.0.1:0")).address
        came = []
        for ready in (False, True):
            if synchronous:
                came.append(await asyncio.to_thread(synchronous_tenant, address, ready))
            else:
                came.append(await tenant(executor, ready))
    assert came[1][:2] == pytest.approx(came[0][:2], rel=1e-3)
    assert came[1][2] == came[0][2]


def test_trust_is_stated_for_each_address() -> None:
    """The client's key and ``insecure`` apply to its own executor only."""
    own = {"key": "one.secret", "insecure": True, "retry": 5.0}
    shares = SecretShares(with_="tcp://other:7000")
    plain: Any = shares._transport("tcp://other:7000", {"retry": 5.0})
    inherited: Any = shares._transport("tcp://other:7000", own)
    assert _settings(inherited) == _settings(plain)
    told: Any = SecretShares(with_="tcp://other:7000", options={"insecure": True})._transport("tcp://other:7000", own)
    assert _settings(told) == {**_settings(plain), "_insecure": True}


def _settings(transport: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(transport).items() if isinstance(value, str | bool | float | None)}


# Executors that restart or die.


def once(seen: list[Seen]) -> list[Seen]:
    """Return calls without those that are bit-equal to an earlier one: these were sent again."""
    kept: list[Seen] = []
    found: set[tuple[Any, bytes]] = set()
    for one in seen:
        content = one.key, one.tensors[0].numpy().tobytes()
        if content not in found:
            found.add(content)
            kept.append(one)
    return kept


def without_effects(seen: list[Seen], name: str) -> list[Seen]:
    if name != "noise-pool":
        return seen
    return [
        one
        for one in seen
        if one.key.pass_ is not Pass.FORWARD_WITHOUT_BIAS
        and (one.key.pass_ is not Pass.BACKWARD or one.tensors[0].shape[0] != POOL)
    ]


def noise_of(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Collect the noise [n, w] of each later request under pads and shares, in units of its amplitude."""
    found: list[torch.Tensor] = []

    def watched(cls: type[Pads] | type[Shares], wraps: bool) -> None:
        mask = cls.mask

        def masked(self: Any, asked: Any, x: torch.Tensor, amplitude: float, kind: Any) -> MaskedRows:
            made = mask(self, asked, x, amplitude, kind)
            (sent,) = made.calls[0].tensors
            noise = sent.double() - x.double() * (1.0 if wraps else 0.5)
            noise /= amplitude
            found.append((noise + 1) % 2 - 1 if wraps else noise)
            return made

        monkeypatch.setattr(cls, "mask", masked)

    watched(Pads, True)
    watched(Shares, False)
    return found


def assert_used_once(noise: list[torch.Tensor]) -> None:
    """Check that no row of the noise is parallel to another."""
    for width in {matrix.shape[1] for matrix in noise}:
        rows = torch.cat([matrix for matrix in noise if matrix.shape[1] == width]).float()
        rows /= rows.norm(dim=1, keepdim=True)
        for start in range(0, len(rows), 512):
            alike = rows[start : start + 512] @ rows.t()
            alike[torch.arange(len(alike)), start + torch.arange(len(alike))] = 0.0
            assert alike.abs().max() < 0.999


def test_noise_that_is_used_twice_is_detected() -> None:
    rows = 2 * torch.rand(600, 16, generator=torch.Generator().manual_seed(0)) - 1
    assert_used_once([rows[:100], rows[100:]])
    for again in (rows[5:6], 0.5 * rows[599:] + 1e-3, -rows[:1]):
        with pytest.raises(AssertionError):
            assert_used_once([rows, again])


@ALL
@pytest.mark.parametrize("synchronous", [False, True], ids=["coroutines", "synchronous"])
async def test_repeated_calls_are_equal(
    name: str, synchronous: bool, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors are restarted in the middle of requests, and rows are not masked again.

    Without equal repetitions, executors received exactly the requests of an undisturbed run. No noise was used for two
    rows.
    """
    expected = run_job_plain(base, lora(), JOB)
    async with symbiosis.Executor(copy.deepcopy(base)) as quiet:
        with Wiretap(quiet) as undisturbed:
            async with quiet.client(lora(), seed=0) as client:
                await run_job(client, JOB)
    noise = noise_of(monkeypatch)
    executors = [symbiosis.Executor(copy.deepcopy(base)) for _ in range(4)]

    def synchronous_tenant() -> Any:
        with symbiosis.open_model(address, **options) as model:
            return run_job_plain(model, lora(), JOB)

    async def tenant() -> Any:
        async with symbiosis.connect(address, **options) as remote, remote.client(lora(), seed=0) as client:
            return await run_job(client, JOB)

    async with symbiosis.Executor(copy.deepcopy(base)) as second:
        other = (await second.listen("tcp://127.0.0.1:0")).address
        options: dict[str, Any] = {"privacy": scheme(name, base, other), "retry": 30.0}
        with contextlib.ExitStack() as stack:
            taps = [stack.enter_context(Wiretap(executor)) for executor in executors]
            beside = stack.enter_context(Wiretap(second))
            await executors[0].start()
            address = (await executors[0].listen("tcp://127.0.0.1:0")).address
            job = asyncio.create_task(in_thread(synchronous_tenant) if synchronous else tenant())
            await restart(address, executors, job)
            outcome = await asyncio.wait_for(job, 60)
            await executors[-1].close()
    assert_near(Comparison.of(outcome, expected))
    assert sum(bool(tap.seen) for tap in taps) >= 3
    true = undisturbed.seen
    received = [[seen for tap in taps for seen in tap.seen], *([beside.seen] if name == "secret-shares" else [])]
    for calls in received:
        rows = without_effects(once(calls), name)
        assert [seen.key.layers for seen in rows] == [seen.key.layers for seen in true]
        if name in ("local-pads", "secret-shares"):
            assert [seen.tensors[0].shape for seen in rows] == [matrix.shape for matrix in noise]
    assert_used_once(noise)
    if name == "noise-pool":
        count_uses(once(received[0]), true)


def count_uses(seen: list[Seen], true: list[Seen]) -> None:
    """Check that each vector of a pool masks at most 40 rows, over all executors."""
    vectors: dict[Any, list[torch.Tensor]] = {}
    for one in seen:
        if without_effects([one], "noise-pool") == []:
            pass_ = Pass.BACKWARD if one.key.pass_ is Pass.BACKWARD else Pass.FORWARD
            vectors.setdefault((one.key.layers, pass_), []).append(one.tensors[0])
    uses: dict[Any, list[int]] = {}
    for one, bare in zip(without_effects(seen, "noise-pool"), true, strict=True):
        known = torch.cat(vectors[one.key.layers, one.key.pass_])
        noise = one.tensors[0] - bare.tensors[0]
        unit = noise / noise.abs().amax(dim=1, keepdim=True)
        alike = (unit @ known.t()) / unit.norm(dim=1, keepdim=True) / known.norm(dim=1)
        best, which = alike.max(dim=1)
        assert best.min() > 0.95
        counts = uses.setdefault((one.key.layers, one.key.pass_), [0] * len(known))
        for index in which.tolist():
            counts[index] += 1
    assert max(max(counts) for counts in uses.values()) <= 40


async def test_shares_survive_either_executor(base: Any) -> None:
    expected = run_job_plain(base, lora(), JOB)
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    both = [[symbiosis.Executor(copy.deepcopy(base)) for _ in range(3)] for _ in addresses]
    for address, (first, *_) in zip(addresses, both, strict=True):
        await first.start()
        await first.listen(address)
    async with symbiosis.connect(addresses[0], retry=30.0, privacy=SecretShares(addresses[1], scale=SCALE)) as remote:
        async with remote.client(lora(), seed=0) as client:
            job = asyncio.create_task(run_job(client, JOB))
            await asyncio.gather(*(restart(a, executors, job) for a, executors in zip(addresses, both, strict=True)))
            outcome = await asyncio.wait_for(job, 60)
    for executors in both:
        await executors[-1].close()
    assert_near(Comparison.of(outcome, expected))


def never_answering(executor: symbiosis.Executor) -> list[Call]:
    """From now on, an executor accepts calls of clients that join, and never answers them."""
    taken: list[Call] = []

    def tap(session: Any) -> Any:
        def submit(call: Call) -> asyncio.Future[Any]:
            taken.append(call)
            return asyncio.get_running_loop().create_future()

        session.submit, session.at_once = submit, lambda call: None
        return session

    executor.service.taps.append(tap)
    return taken


@pytest.mark.parametrize("synchronous", [False, True], ids=["coroutines", "synchronous"])
@pytest.mark.parametrize("transport", ["shm", "tcp", "dist"])
async def test_shares_never_reach_one_executor(transport: str, synchronous: bool, base: Any, tmp_path: Path) -> None:
    """An executor ends while it has shares of a call, and the other executor appears at its address.

    The other executor receives neither the outstanding shares nor later ones.
    """
    addresses = []
    for number in ("one", "two"):
        (tmp_path / number).mkdir()
        addresses.append(address_of(transport, tmp_path / number))
    options = {"privacy": SecretShares(addresses[1], options=insecure(transport)), "retry": 30.0, **insecure(transport)}

    async def tenant() -> None:
        async with symbiosis.connect(addresses[0], **options) as remote, remote.client() as client:
            for _ in range(2):
                with pytest.raises(PrivacyError, match="lead to the same executor"):
                    await client.forward(input_ids=IDS)

    def synchronous_tenant() -> None:
        with symbiosis.open_model(addresses[0], **options) as model:
            for _ in range(2):
                with pytest.raises(PrivacyError, match="lead to the same executor"):
                    model(IDS)

    async with symbiosis.Executor(copy.deepcopy(base)) as one, symbiosis.Executor(copy.deepcopy(base)) as two:
        taken = never_answering(two)
        await one.listen(addresses[0], **insecure(transport))
        await two.listen(addresses[1], **insecure(transport))
        with Wiretap(one) as tap:
            job = asyncio.create_task(in_thread(synchronous_tenant) if synchronous else tenant())
            await until(lambda: taken or job.done())
            await two.close()
            await one.listen(addresses[1], **insecure(transport))
            await asyncio.wait_for(job, 30)
    assert taken
    assert {seen.client.endswith("-elsewhere") for seen in tap.seen} == {False}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["local-pads", "secret-shares"])
def test_executors_killed(name: str, tmp_path: Path) -> None:
    """Each executor is killed with SIGKILL in the middle of training."""
    checkpoint = save_model(tmp_path / "model")
    base = tiny_model("llama")
    expected = run_job_plain(base, lora(), JOB)
    services = [
        Service(checkpoint, f"tcp://127.0.0.1:{free_port()}", log=tmp_path / f"{n}.log")
        for n in range(1 + (name == "secret-shares"))
    ]
    with contextlib.ExitStack() as stack:
        for service in services:
            stack.enter_context(service)
        privacy = scheme(name, checkpoint, services[-1].address)
        with symbiosis.open_model(services[0].address, retry=60.0, privacy=privacy) as model:
            steps = 0

            def kill(*_: Any) -> None:
                nonlocal steps
                steps += 1
                if steps in (3, 6):
                    service = services[steps // 6 % len(services)]
                    service.kill()
                    service.start()

            model.register_forward_hook(kill)
            outcome = run_job_plain(model, lora(), JOB)
        assert steps > 8
    assert_near(Comparison.of(outcome, expected))


async def test_pads_in_a_folder_over_clients_and_executors(base: Any, tmp_path: Path) -> None:
    """Clients use the same folder one after another, and no row is sent twice."""
    sent = []
    for _ in range(3):
        async with symbiosis.Executor(copy.deepcopy(base)) as executor:
            pads = LocalPads(base, rows=8, folder=tmp_path / "pads")
            with Wiretap(executor) as tap:
                async with executor.client(privacy=pads) as client:
                    await client.forward(input_ids=IDS)
                    with pytest.raises(PrivacyError, match="in use by another client"):
                        await executor.client(privacy=pads).open()
            sent += [row.numpy().tobytes() for seen in tap.seen for row in seen.tensors[0]]
    assert len(set(sent)) == len(sent) > 300


# The command line.


@pytest.mark.thorough
def test_commands(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "model")
    data = tmp_path / "data.txt"
    data.write_text("the cat sat on the mat and the dog ran on the log " * 20)
    prompt = ("generate", "--prompt", "the cat sat", "--max-new-tokens", "4")
    with Service(checkpoint, f"tcp://127.0.0.1:{free_port()}", log=tmp_path / "one.log") as one:
        with Service(checkpoint, f"tcp://127.0.0.1:{free_port()}", log=tmp_path / "two.log") as two:
            bare = command(prompt[0], one.address, *prompt[1:])
            assert bare.exit_code == 0, bare.stderr
            for privacy in (f"local-pads:model={checkpoint}", f"secret-shares:with={two.address},scale=16"):
                masked = command(prompt[0], one.address, *prompt[1:], "--privacy", privacy)
                assert masked.exit_code == 0, masked.stderr
                assert masked.stdout == bare.stdout
            tuned = command(
                *("finetune", one.address, "--data", str(data), "--output", str(tmp_path / "adapter")),
                *("--steps", "3", "--sequence", "16", "--privacy", "noise-pool:size=8"),
            )
            assert tuned.exit_code == 0, tuned.stderr
            assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
            for wrong, why in (
                ("one-time-pad", "known are noise-pool"),
                (f"secret-shares:with={one.address}", "own address"),
            ):
                refused = command(prompt[0], one.address, *prompt[1:], "--privacy", wrong)
                assert refused.exit_code != 0
                assert why in " ".join(refused.stderr.split()), refused.stderr
                assert isinstance(refused.exception, SystemExit), refused.exception  # no traceback


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_bench(tmp_path: Path) -> None:
    file = tmp_path / "privacy.json"
    done = run_command("bench", "privacy", "--preset", "tiny", "--rounds", "1", "--json", str(file), within_s=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert [row["scheme"] for row in report["rows"]][:2] == ["none", "noise-pool"]
    assert {"overhead_shares", "logit_error_local_pads"} <= report["headline"].keys()
    parts = [report["headline"][f"overhead_noise_pool_{job}"] for job in ("decode", "training")]
    assert report["headline"]["overhead_noise_pool"] == pytest.approx(sum(parts) / 2)  # the median of one round
    errors = [value for key, value in report["headline"].items() if key.startswith("logit_error")]
    assert all(0 < error < 1e-2 for error in errors)


class Broken:
    """A scheme that cannot mask anything."""

    name = "broken"

    async def wrap(self, channel: Any, address: str, terms: Any, options: Any) -> Any:
        raise RuntimeError("no key file")

    def wrap_blocking(self, channel: Any, address: str, terms: Any, options: Any) -> Any:
        raise RuntimeError("no key file")


@pytest.mark.parametrize("where", ["executor", "connect", "open_model"])
async def test_a_scheme_that_fails_leaves_no_client_connected(where: str, base: Any, tmp_path: Path) -> None:
    address = f"shm://{tmp_path}/s.sock"
    async with symbiosis.Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        await executor.listen(address)
        served = await stack.enter_async_context(symbiosis.connect(address))
        kept: list[Any] = []  # errors, with the frames of their tracebacks
        for _ in range(2):
            opening: Any
            if where == "open_model":
                opening = in_thread(symbiosis.open_model(address, name="alice", privacy=Broken()).__enter__)
            else:
                opening = (executor if where == "executor" else served).client(name="alice", privacy=Broken()).open()
            with pytest.raises(RuntimeError, match="no key file") as error:
                await opening
            kept.append(error)
            await until(lambda: not executor.service.clients)
