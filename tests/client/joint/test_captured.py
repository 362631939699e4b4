"""Captured walks: each tenant gets what plain PEFT gives. On a CPU, the model's own code stands in for the graph."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from symbiosis import Client
from symbiosis.client.joint import captured, decoder
from symbiosis.client.joint.captured import CapturedWalks
from symbiosis.client.joint.pool import Pool, PooledLayer
from symbiosis.policies import Fair, NoLockstep
from symbiosis.testing import tiny_model
from tests.client.joint import test_images
from tests.client.joint.common import (
    assert_equal,
    check_each_tenant,
    expected_of,
    generate,
    model_of,
    plain,
    some_clients,
    text,
)
from tests.helpers import BATCH, LOGITS, adamw, lora


class _Walks:
    """Joint walks while captures are possible."""

    def __init__(self) -> None:
        self.all = self.captured = 0
        self.refusals: set[str | None] = set()


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tolerance(device: str) -> float:
    """Return the tolerance of logits. Kernels on a GPU sum in another order for another number of rows."""
    return LOGITS if device == "cpu" else 1e-4


def _pools(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list to which the rows and the capacity of each further pool are added. No other pool may be there when
    one is made: a GPU may have room for one only."""
    made: list[tuple[int, int]] = []
    earlier: list[weakref.ref[Pool]] = []
    make = Pool.__init__

    def noted(self: Pool, like: Any, rows: int, capacity: int) -> None:
        assert not any(pool() for pool in earlier)
        made.append((rows, capacity))
        make(self, like, rows, capacity)
        earlier.append(weakref.ref(self))

    monkeypatch.setattr(Pool, "__init__", noted)
    return made


@pytest.fixture
def walks(device: str, monkeypatch: pytest.MonkeyPatch) -> _Walks:
    """Count joint walks, and have the decoder make captured ones on a CPU too."""
    count = _Walks()
    outputs = CapturedWalks.outputs

    async def counted(self: CapturedWalks, *args: Any) -> Any:
        found = await outputs(self, *args)
        count.all += 1
        count.captured += bool(found)
        count.refusals.add(self.refusal)
        return found

    if device == "cpu":
        monkeypatch.setattr(decoder, "can_capture", lambda device: True)
    monkeypatch.setattr(CapturedWalks, "outputs", counted)
    return count


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
async def test_each_tenant_gets_what_plain_peft_gives(device: str, walks: _Walks, architecture: str) -> None:
    await check_each_tenant(architecture, architecture == "llama", "fast", device, tolerance(device))
    assert walks.captured > 5
    assert walks.refusals == {None}


async def test_windows_are_not_captured(device: str, walks: _Walks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await check_each_tenant("gemma2", False, "fast", device, tolerance(device))
    assert walks.refusals == {"its cache has layers of other kinds than full attention"}
    assert "joint walks are not captured: its cache has layers of other kinds than full attention" in caplog.text


async def test_experts_are_not_captured(device: str, walks: _Walks) -> None:
    await check_each_tenant("mixtral", False, "fast", device, tolerance(device))
    assert walks.refusals == {"its code reads on the host which experts have rows"}


async def test_layers_of_one_width_are_not_captured(device: str, walks: _Walks) -> None:
    """The key of the whole walk could be that of siblings."""
    base = tiny_model("llama", intermediate_size=32).to(device)
    async with some_clients(2, base) as (_, clients):
        await asyncio.gather(*map(generate, clients))
    assert walks.refusals == {"its base layers all take rows of one width"}


async def test_exact_walks_are_not_captured(device: str, walks: _Walks) -> None:
    async with some_clients(2, model_of("llama").to(device), joint="exact") as (_, clients):
        await asyncio.gather(*map(generate, clients))
    assert walks.all == 0


async def test_the_rows_of_one_client_change_nothing_of_another(device: str, walks: _Walks) -> None:
    """Texts of all lengths come and go in the rows of a pool, some clients pause, and room is made for longer texts."""
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(4, base) as (_, clients):

        async def write(number: int, client: Client) -> list[tuple[int, int, Any]]:
            found = []
            for turn in range(4):
                length, tokens = 3 + (5 * number + 7 * turn) % 23, 6 + (number + turn) % 5
                found.append((length, tokens, await generate(client, length, tokens)))
                await asyncio.sleep(0.01 * ((number + turn) % 3))
            return found

        texts = await asyncio.gather(*(write(number, client) for number, client in enumerate(clients)))
    assert walks.captured > 10
    for number, found in enumerate(texts):
        for length, tokens, out in found:
            assert_equal(out, expected_of(plain_base, number, length, tokens), tolerance(device))


async def test_room_for_longer_texts_is_made(device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    monkeypatch.setattr(captured, "_FIRST", 8)
    async with some_clients(3, base) as (_, clients):
        sizes = _pools(monkeypatch)
        lengths = 4, 9, 30
        outs = await asyncio.gather(
            *(generate(client, length, 24) for client, length in zip(clients, lengths, strict=True))
        )
    assert [capacity for _, capacity in sizes] == sorted({capacity for _, capacity in sizes})
    assert {rows for rows, _ in sizes} == {4}
    assert len(sizes) > 1
    for number, (out, length) in enumerate(zip(outs, lengths, strict=True)):
        assert_equal(out, expected_of(plain_base, number, length, 24), tolerance(device))


async def test_a_pool_that_would_take_too_much_memory_is_not_made(
    device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    monkeypatch.setattr(captured, "_free", lambda device: 1000.0)
    async with some_clients(2, base) as (_, clients):
        outs = await asyncio.gather(*map(generate, clients))
    assert walks.captured == 0
    assert caplog.text.count("joint walks are not captured: 2 rows of 256 tokens would take more than half") == 1
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number), tolerance(device))


async def test_more_clients_than_a_captured_walk_has_rows(
    device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(captured, "MAX_ROWS", 2)
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(3, base) as (_, clients):
        outs = await asyncio.gather(*map(generate, clients))
    assert walks.captured == 0
    assert "joint walks are not captured: 3 clients decode, and a captured walk has 2 rows" in caplog.text
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number), tolerance(device))


async def test_a_failed_capture_is_told_and_clients_are_walked_without_it(
    device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)

    def fail(walk: captured.CapturedWalk) -> None:
        walk.compute()
        raise ZeroDivisionError

    monkeypatch.setattr(captured.CapturedWalk, "run", fail)
    async with some_clients(3, base) as (_, clients):
        outs = await asyncio.gather(*map(generate, clients))
    assert walks.captured == 0
    assert "joint walks are not captured: a walk could not be captured: ZeroDivisionError" in caplog.text
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number), tolerance(device))


async def test_a_mask_hides_tokens(device: str, walks: _Walks) -> None:
    """A client's text is padded on the left, and the same row has a text without padding before and after."""
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    mask = torch.ones(1, 9, dtype=torch.long, device=device)
    mask[0, :4] = 0
    async with some_clients(2, base) as (_, clients):
        outs = []
        for masked in (False, True, False):
            options: dict[str, Any] = {"attention_mask": mask} if masked else {}
            outs.append(await asyncio.gather(generate(clients[0], 9, **options), generate(clients[1], 5)))
    assert walks.captured > 10
    for masked, (one, other) in zip((False, True, False), outs, strict=True):
        options = {"attention_mask": mask} if masked else {}
        assert_equal(one, expected_of(plain_base, 0, 9, **options), tolerance(device))
        assert_equal(other, expected_of(plain_base, 1, 5), tolerance(device))


@contextlib.asynccontextmanager
async def _texts(base: Any) -> Any:
    """Yield two clients whose caches are in a pool, the caches, and the token ids of the texts."""
    async with some_clients(2, base) as (_, clients):
        outs = await asyncio.gather(*(generate(client, 5 + number, 16) for number, client in enumerate(clients)))
        yield clients, [out.past_key_values for out in outs], [out.sequences for out in outs]


def _cache_of(base: Any, seed: int, ids: torch.Tensor) -> DynamicCache:
    """Return the cache of a plain PEFT job after all but the last token."""
    torch.manual_seed(seed)
    model = get_peft_model(copy.deepcopy(base), lora()).eval()
    return model(input_ids=ids[:, :-1], use_cache=True).past_key_values


def _assert_same(cache: Any, expected: Any) -> None:
    assert cache.get_seq_length() == expected.get_seq_length()
    for layer, right in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, right.keys, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(layer.values, right.values, atol=1e-4, rtol=1e-3)


def _copied(cache: Any) -> Any:
    return copy.deepcopy(cache)


def _pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


def _cropped_and_restored(cache: Any) -> Any:
    before = copy.deepcopy(cache)
    cache.crop(-3)
    assert cache.get_seq_length() == before.get_seq_length() - 3
    for layer, whole in zip(cache.layers, before.layers, strict=True):
        assert torch.equal(layer.keys, whole.keys[:, :, :-3])
        assert torch.equal(layer.values, whole.values[:, :, :-3])
    return before


@pytest.mark.parametrize("how", [lambda cache: cache, _copied, _pickled, _cropped_and_restored])
async def test_a_cache_of_a_pool_is_the_clients_own(device: str, walks: _Walks, how: Any) -> None:
    """It has the numbers of a plain job's, can be copied and changed, and no client gets memory of the pool."""
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with _texts(base) as (clients, caches, ids):
        assert all(type(layer) is PooledLayer for cache in caches for layer in cache.layers)
        (pool,) = {id(walk.pool): walk.pool for walk in _walks_of(clients)}.values()
        memory = {tensor.untyped_storage().data_ptr() for tensor in (*pool.keys, *pool.values)}
        for number, cache in enumerate(caches):
            found = how(cache)
            _assert_same(found, _cache_of(plain_base, number, ids[number]))
            for layer in (*found.layers, *cache.layers):
                for tensor in (layer.keys, layer.values):
                    assert tensor.untyped_storage().data_ptr() not in memory
        # other texts in the same rows change nothing
        kept = [copy.deepcopy(cache) for cache in caches]
        await asyncio.gather(*(generate(client, 9, 16) for client in clients))
        for cache, before in zip(caches, kept, strict=True):
            _assert_same(cache, before)


def _walks_of(clients: Any) -> list[Any]:
    return [client._joint().captured._walk for client in clients]


async def test_a_text_goes_on_after_its_cache_was_changed(device: str, walks: _Walks) -> None:
    """A client takes tokens back between two tokens, which plain code would do too."""
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)

    def write(model: Any, ids: torch.Tensor) -> list[int]:
        with torch.no_grad():
            cache, token, tokens = None, ids, []
            for step in range(24):
                output = model(input_ids=token, past_key_values=cache, use_cache=True)
                cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
                tokens.append(int(token))
                if step % 7 == 6:
                    cache.crop(-2)
        return tokens

    async with some_clients(2, base) as (_, clients):
        both = await asyncio.gather(
            *(client.run(write, client.model, text(6, number).to(device)) for number, client in enumerate(clients))
        )
    assert walks.captured > 10
    for number, found in enumerate(both):
        torch.manual_seed(number)
        assert found == write(get_peft_model(copy.deepcopy(plain_base), lora()).eval(), text(6, number).to(device))


async def test_clients_that_come_and_go(device: str, walks: _Walks) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(2, base) as (executor, clients):
        staying = asyncio.gather(*(generate(client, 6, 60) for client in clients))
        for number in range(2, 5):
            async with executor.client(lora(), name=f"guest-{number}", seed=number) as guest:
                assert_equal(await generate(guest, 5, 14), expected_of(plain_base, number, 5, 14), tolerance(device))
        outs = await staying
    assert walks.captured > 10
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number, 6, 60), tolerance(device))


async def test_statistics_and_fair_sharing_count_captured_walks(device: str, walks: _Walks) -> None:
    async with some_clients(2, model_of("llama").to(device), policy=Fair(NoLockstep())) as (executor, clients):
        await asyncio.gather(*(generate(client, 6, 40) for client in clients))
        statistics = executor.statistics()
    assert walks.captured > 20
    (whole,) = [counts for name, counts in statistics.layers.items() if "…lm_head" in name]
    assert whole.requests >= 2 * 30
    assert whole.requests == 2 * whole.batches == whole.rows
    for client in clients:
        counts = statistics.clients[client.name]
        assert counts.tokens["decode"] == pytest.approx(39, abs=1)
        assert statistics.tenants[client.name].service > 0


async def test_walks_are_captured_beside_fine_tuning(device: str, walks: _Walks) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(2, base) as (executor, clients), executor.client(lora()) as trainer:
        task = asyncio.create_task(_train(trainer, adamw(trainer.model)))
        await asyncio.gather(*map(generate, clients))
        before = walks.captured, executor.statistics().clients[trainer.name].requests
        outs = await asyncio.gather(*map(generate, clients))
        after = walks.captured, executor.statistics().clients[trainer.name].requests
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert all(more > less for more, less in zip(after, before, strict=True))
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number), tolerance(device))


async def _train(client: Client, optimizer: torch.optim.Optimizer) -> None:
    while True:
        await client.train_step(BATCH, optimizer)


async def test_ten_clients_have_two_stacks(device: str, walks: _Walks) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(10, base) as (_, clients):
        outs = await asyncio.gather(*(generate(client, 4 + number) for number, client in enumerate(clients)))
    assert walks.captured > 5
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number, 4 + number), tolerance(device))


async def test_a_captured_walk_is_not_divided(device: str, walks: _Walks) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(3, base, max_rows=2) as (_, clients):
        outs = await asyncio.gather(*map(generate, clients))
    assert walks.captured > 5
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number), tolerance(device))


def _write(model: Any, ids: torch.Tensor, grad: bool = False, **options: Any) -> tuple[Any, Any]:
    """Decode twelve tokens by plain code, and return the cache, and its first layer as it was after the prompt."""
    with torch.set_grad_enabled(grad):
        output = model(input_ids=ids, use_cache=True)
    layer = output.past_key_values.layers[0]
    with torch.no_grad():
        for _ in range(12):
            token = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True, **options)
    return output.past_key_values, layer


async def test_a_prompt_with_gradients_and_a_layer_that_the_client_keeps(device: str, walks: _Walks) -> None:
    async with some_clients(2, model_of("llama").to(device)) as (_, clients):
        await asyncio.gather(*map(generate, clients))
        before = walks.captured
        both = await asyncio.gather(
            *(client.run(_write, client.model, text(6).to(device), client is clients[0]) for client in clients)
        )
        assert walks.captured > before
        for cache, layer in both:
            assert layer is cache.layers[0]
            assert layer.get_seq_length() == cache.get_seq_length() == 18
        assert not any(tensor.requires_grad for tensor in _walks_of(clients)[0].pool.keys)
        assert not both[1][0].layers[0].keys.requires_grad
        copy.deepcopy(both[1][0])


async def test_numbers_that_are_not_finite_stay_in_their_text(device: str, walks: _Walks) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(2, base) as (_, clients):
        await asyncio.gather(*(generate(client, 6, 16) for client in clients))
        weight = next(p for name, p in clients[0].model.named_parameters() if "v_proj.lora_B" in name)
        before = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(float("nan"))
        captured_before = walks.captured
        damaged, beside = await asyncio.gather(*(generate(client, 12, 16) for client in clients))
        assert walks.captured > captured_before
        with torch.no_grad():
            weight.copy_(before)
        outs = await asyncio.gather(*map(generate, clients))
    assert torch.stack(damaged.logits).isnan().all()
    assert_equal(beside, expected_of(plain_base, 1, 12, 16), tolerance(device))
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number), tolerance(device))


async def test_a_client_that_pauses_deletes_its_adapter(
    device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "_FIRST", 16)
    async with some_clients(3, model_of("llama").to(device)) as (executor, clients):
        await asyncio.gather(*(generate(client, 4, 10) for client in clients))
        clients[2].model.add_adapter("other", lora())
        clients[2].model.set_adapter("other")
        clients[2].model.delete_adapter("default")
        executor.reset_statistics()
        before = walks.captured
        await asyncio.gather(*(generate(client, 4, 40) for client in clients[:2]))
        assert executor.statistics().clients[clients[0].name].joint > 30
        assert walks.captured > before + 20
        await asyncio.gather(*(generate(client, 4, 10) for client in clients))
    assert walks.refusals == {None}


async def test_masks_and_prompts_that_a_captured_walk_cannot_take(device: str, walks: _Walks) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(2, base) as (_, clients):
        await asyncio.gather(*map(generate, clients))
        options = {"attention_mask": torch.ones(1, 4, device=device)}
        (cache, _), short = await asyncio.gather(
            clients[0].run(_write, clients[0].model, text(6).to(device), **options), generate(clients[1], 1, 14)
        )
        outs = await asyncio.gather(*map(generate, clients))
    assert walks.refusals == {None}
    expected, _ = _write(plain(plain_base, lora(), 0), text(6).to(device), **options)
    for layer, right in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(
            layer.keys, right.keys, rtol=0, atol=tolerance(device) * float(right.keys.abs().max())
        )
    assert_equal(short, expected_of(plain_base, 1, 1, 14), tolerance(device))
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number), tolerance(device))


async def test_a_text_that_is_too_long_for_a_pool_leaves_the_others_theirs(
    device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "_FIRST", 64)
    monkeypatch.setattr(Pool, "size", lambda like, rows, capacity: capacity)
    monkeypatch.setattr(captured, "_free", lambda device: 130.0)
    monkeypatch.setattr(Pool, "bytes", 0)
    async with some_clients(3, model_of("llama").to(device)) as (_, clients):
        await asyncio.gather(*(generate(client, 4, 10) for client in clients))
        made = _pools(monkeypatch)
        short = asyncio.gather(*(generate(client, 4, 50) for client in clients[:2]))
        for _ in range(3):
            await generate(clients[2], 70, 4)
            await asyncio.sleep(0.02)
        await short
    assert made == []
    assert walks.captured > 20


async def test_a_cache_that_is_read_during_a_walk_gets_the_walks_token(device: str, walks: _Walks) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    caches = [DynamicCache(), DynamicCache()]
    async with some_clients(2, base) as (_, clients):

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.003)
                for layer in caches[0].layers[:1]:
                    assert layer.keys is not None

        watching = asyncio.create_task(watch())
        outs = await asyncio.gather(
            *(generate(c, 6, 40, past_key_values=own) for c, own in zip(clients, caches, strict=True))
        )
        watching.cancel()
        await asyncio.wait([watching])
        assert watching.cancelled()
    assert walks.captured > 5
    for number, out in enumerate(outs):
        assert {layer.get_seq_length() for layer in caches[number].layers} == {45}
        assert_equal(out, expected_of(plain_base, number, 6, 40), tolerance(device))


def test_a_cache_that_does_not_fit_takes_the_place_of_a_full_one() -> None:
    """A walk would write the next token of the full one behind the pool's end."""

    def cache_of(tokens: int, dtype: torch.dtype) -> DynamicCache:
        cache = DynamicCache()
        cache.update(*torch.ones(2, 1, 1, tokens, 2, dtype=dtype), layer_idx=0)
        return cache

    full, other = cache_of(3, torch.float32), cache_of(2, torch.float16)
    pool = Pool(full, rows=1, capacity=4)
    assert pool.put(0, full)
    pool.add_token(0, full)
    assert not pool.put(0, other)
    assert pool.texts == [None]
    assert type(full.layers[0]) is DynamicLayer
    assert full.get_seq_length() == 4


async def test_errors_of_one_client_and_of_a_pool_do_not_reach_the_others(
    device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)

    def fail(self: Pool, *args: Any) -> None:
        raise torch.OutOfMemoryError

    caplog.set_level("INFO")
    async with some_clients(3, base) as (executor, clients):
        await asyncio.gather(*map(generate, clients))
        if device == "cpu":  # on a GPU, a position out of range ends the process's use of the GPU
            place = captured.CapturedWalk.place

            def place_once(walk: captured.CapturedWalk, tokens: Any) -> None:
                monkeypatch.setattr(captured.CapturedWalk, "place", place)
                raise IndexError

            monkeypatch.setattr(captured.CapturedWalk, "place", place_once)
            await asyncio.gather(*map(generate, clients))
            assert captured.CapturedWalk.place is place
            assert walks.refusals == {None}
            assert "joint walks are not captured: a client's token failed: IndexError" in caplog.text
        cache = DynamicCache()
        await asyncio.gather(generate(clients[0], past_key_values=cache), *map(generate, clients[1:]))
        assert isinstance(cache.layers[0], PooledLayer)
        executor.reset_statistics()
        before = walks.captured
        with torch.inference_mode():
            await clients[2].close()
        assert type(cache.layers[0]) is DynamicLayer, "all caches have left the pool"
        assert not cache.layers[0].keys.is_inference()
        monkeypatch.setattr(Pool, "__init__", fail)
        outs = await asyncio.gather(*map(generate, clients[:2]))
        assert executor.statistics().clients[clients[0].name].joint > 8
        assert walks.captured == before
    assert caplog.text.count("joint walks are not captured: a walk could not be captured: OutOfMemoryError") == 1
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number), tolerance(device))


async def test_a_client_whose_tokens_do_not_fit_leaves_the_others_their_walk(
    device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    options = {"attention_mask": torch.ones(1, 20, device=device)}
    async with some_clients(3, base) as (_, clients):
        made = _pools(monkeypatch)
        await asyncio.gather(*(generate(client, 6, 14) for client in clients))
        before = walks.all - walks.captured
        (_, layer), *outs = await asyncio.gather(
            clients[0].run(_write, clients[0].model, text(6).to(device), **options),
            *(generate(client, 6, 14) for client in clients[1:]),
        )
        assert walks.all - walks.captured == before, "a captured walk served the others at each token"
    assert len(made) == 1
    assert "not captured: its attention mask does not have a column for each token" in caplog.text
    torch.manual_seed(0)
    plain = get_peft_model(copy.deepcopy(plain_base), lora()).eval()
    _, expected = _write(plain, text(6).to(device), **options)
    torch.testing.assert_close(layer.keys, expected.keys, atol=1e-4, rtol=1e-3)
    for number, out in enumerate(outs, 1):
        assert_equal(out, expected_of(plain_base, number, 6, 14), tolerance(device))


async def test_tokens_with_several_positions_are_walked_by_code(
    device: str, walks: _Walks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    base = test_images.model_of(test_images.QWEN).to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(2, base) as (executor, clients):
        outs = await asyncio.gather(*(generate(client, 6, 14) for client in clients))
        assert executor.statistics().clients[clients[0].name].joint >= 10
    assert walks.captured == 0
    assert "tokens of a client are not captured: its tokens have several positions each" in caplog.text
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number, 6, 14), tolerance(device))


async def test_a_client_that_changes_its_adapter_again_and_again(
    device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(3, base) as (_, clients):
        clients[0].model.add_adapter("other", lora())
        clients[0].model.eval()
        made = _pools(monkeypatch)

        async def change() -> None:
            for number in range(12):
                clients[0].model.set_adapter(("other", "default")[number % 2])
                await generate(clients[0], 4, 8)

        _, *outs = await asyncio.gather(change(), *(generate(client, 6, 60) for client in clients[1:]))
    assert walks.captured > 40
    assert len(made) == 1
    for number, out in enumerate(outs, 1):
        assert_equal(out, expected_of(plain_base, number, 6, 60), tolerance(device))


async def test_clients_that_begin_one_after_another_need_one_capture(
    device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(2, base) as (executor, clients), contextlib.AsyncExitStack() as stack:
        made = _pools(monkeypatch)
        staying = asyncio.gather(*(generate(client, 6, 60) for client in clients))
        while not made:  # noqa: ASYNC110 (a pool sends no event)
            await asyncio.sleep(0)
        guests = [
            await stack.enter_async_context(executor.client(lora(), name=f"guest-{number}", seed=number))
            for number in range(2, 5)
        ]
        before = walks.all

        async def begin(number: int, client: Client) -> Any:
            while walks.all < before + 2 * number:  # noqa: ASYNC110 (a walk sends no event)
                await asyncio.sleep(0)
            return await generate(client, 6, 20)

        outs = [*await asyncio.gather(*map(begin, range(3), guests)), *await staying]
        assert len(made) == 2
    for number, out in zip((2, 3, 4), outs, strict=False):
        assert_equal(out, expected_of(plain_base, number, 6, 20), tolerance(device))
    for number, out in enumerate(outs[3:]):
        assert_equal(out, expected_of(plain_base, number, 6, 60), tolerance(device))


async def test_a_pool_shrinks_after_a_long_text(device: str, walks: _Walks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "_FIRST", 16)
    monkeypatch.setattr(captured, "_SHRINK", 4)
    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(2, base) as (_, clients):
        made = _pools(monkeypatch)
        await asyncio.gather(generate(clients[0], 100, 16), generate(clients[1], 5, 16))
        outs = await asyncio.gather(*(generate(client, 5, 10) for client in clients))
    assert [capacity for _, capacity in made] == [128, 16]
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number, 5, 10), tolerance(device))


async def test_tokens_of_32_bits_are_captured(device: str, walks: _Walks) -> None:
    def write(model: Any, ids: torch.Tensor) -> list[int]:
        with torch.no_grad():
            cache, token, tokens = None, ids, []
            for _ in range(16):
                output = model(input_ids=token, past_key_values=cache, use_cache=True)
                cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1).int()
                tokens.append(int(token))
        return tokens

    base = model_of("llama").to(device)
    plain_base = copy.deepcopy(base)
    async with some_clients(2, base) as (_, clients):
        found = await asyncio.gather(
            *(client.run(write, client.model, text(6, number).to(device)) for number, client in enumerate(clients))
        )
    assert walks.captured > 5
    for number, tokens in enumerate(found):
        torch.manual_seed(number)
        assert tokens == write(get_peft_model(copy.deepcopy(plain_base), lora()).eval(), text(6, number).to(device))
