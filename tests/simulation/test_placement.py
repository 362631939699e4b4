"""Tests of simulated placements: shared cores, links, parts of a model, replicas and shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key, Pass, Request, Slice
from symbiosis.core.terms import Kind, Terms
from symbiosis.errors import UsageError
from symbiosis.policies import CoServing, Lockstep, NoLockstep, Opportunistic
from symbiosis.simulation import Cost, Simulation
from symbiosis.simulation.clients import Done, finetune, forward, generate
from symbiosis.simulation.clock import Clock, Cores, Link, Thread, Way
from symbiosis.simulation.costs import GPUS, MODELS, LlamaShape, shape_of
from symbiosis.simulation.executor import SimulatedExecutor
from symbiosis.simulation.machines import Placement, Site, read_fleet, read_placement
from symbiosis.simulation.outcome import SLO
from symbiosis.simulation.placement import SimulatedModel, TenantWork, fits, needs, place
from symbiosis.simulation.plan import candidates, plan, simulated, traffic
from symbiosis.simulation.replay import ReplayedLoad, replay
from symbiosis.simulation.simulation import Ask, Cluster, Hop, InWalk, Route, SimulatedClient
from symbiosis.simulation.trace import Arrival
from tests.helpers import command

SMALL = LlamaShape(64, 128, 4, 4, 2, 1000)
ONE_GPU = {"machines": {"a": {"gpu": "a100"}}}
TWO = {
    "machines": {"a": {"gpu": "a100"}, "b": {"gpu": "a100"}},
    "links": [{"between": ["a", "b"], "gbit_per_s": 80, "latency_us": 100}],
}
PARTS = {
    **TWO,
    "executors": [{"machine": "a", "layers": "0-1"}, {"machine": "b", "layers": "2-3,lm_head"}],
}


def test_work_shares_cores() -> None:
    """Three threads on two cores run at two thirds of their speed until the first work ends."""
    clock, ends = Clock(), {}
    cores = Cores(clock, 2)

    def end(name: str) -> None:
        ends[name] = clock.now

    for name, seconds, threads in (("a", 2.0, 2), ("b", 4.0, 1)):
        cores.run(seconds, threads, partial(end, name))
    clock.at(1.0, lambda: None)
    while clock.next_at < 100:
        clock.step()
    assert ends == pytest.approx({"a": 3.0, "b": 5.0})


def test_work_on_one_thread_waits_for_earlier_work() -> None:
    """Of two threads on one core, each has half of it; the work that one of them holds back does not take part."""
    clock, ends = Clock(), []
    cores = Cores(clock, 1)
    one, other = Thread(cores), Thread(cores)
    for thread, seconds in ((one, 1.0), (one, 1.0), (other, 2.0)):
        thread.run(seconds, 1, lambda: ends.append(clock.now))
    while clock.next_at < 100:
        clock.step()
    assert ends == pytest.approx([2.0, 4.0, 4.0])


def test_messages_leave_one_after_another() -> None:
    clock, arrived = Clock(), []
    link = Link(clock, 1.0, 100.0)
    for size in (200, 100):
        link.send(size, lambda: arrived.append(clock.now))
    while clock.next_at < 100:
        clock.step()
    assert arrived == [3.0, 4.0]
    assert link.bytes == 300


def _executor(clock: Clock, policy: Policy | None = None, **options: Any) -> SimulatedExecutor:
    return SimulatedExecutor(clock, policy or NoLockstep(), layers=4, cost=Cost(1e-3, 1e-5).of, **options)


def _tokens(route: Route, clock: Clock, names: str = "a", tokens: int = 6) -> dict[str, Done]:
    cluster, texts = Cluster(clock), {name: Done() for name in names}
    for name, done in texts.items():
        cluster.add(name, generate(4, 3, tokens, 2e-3, done), route=route)
    cluster.run()
    return texts


def test_messages_that_come_during_a_batch_are_read_before_the_next_one() -> None:
    class Handled(Way):
        def send(self, size: int, then: Callable[[], None]) -> None:
            thread.run(1e-4, 1, then)

    def call() -> SimulatedClient:
        yield InWalk(True)
        yield Ask(Key((0,), Pass.FORWARD), 1, Kind.DECODE)

    clock = Clock()
    thread, cluster = Thread(Cores(clock, 2)), Cluster(clock)
    executor = _executor(clock, Opportunistic(), thread=thread)
    for name, at in (("a", 0.0), ("b", 3e-4), ("c", 5e-4)):
        cluster.add(name, call(), at=at, route=Route([Hop(executor, Handled(), Handled())]))
    cluster.run()
    assert (executor.batches, executor.members) == (2, 3)


def test_two_parts_are_one_model() -> None:
    """Without links, a client of two parts sees the times of one executor."""
    simulation, one = Simulation(NoLockstep(), layers=4, cost=Cost(1e-3, 1e-5).of), Done()
    simulation.add("a", generate(4, 3, 6, 2e-3, one))
    simulation.run()
    clock = Clock()
    parts = Route([Hop(_executor(clock)), Hop(_executor(clock))], (0, 0, 1, 1))
    assert _tokens(parts, clock)["a"].tokens == pytest.approx(one.tokens)


def test_a_link_adds_its_time_for_each_call() -> None:
    clock, another = Clock(), Clock()
    near = _tokens(Route([Hop(_executor(clock))]), clock)["a"]
    far = _tokens(Route([Hop(_executor(another), Link(another, 1e-3), Link(another, 2e-3))]), another)["a"]
    assert far.per_token == pytest.approx([gap + 4 * 3e-3 for gap in near.per_token])


def test_a_client_is_in_a_walk_at_one_executor_at_a_time() -> None:
    """An executor in lockstep does not wait for a client that is at the other part."""
    clock = Clock()
    first, second = (_executor(clock, Lockstep()) for _ in range(2))
    both, one = Route([Hop(first), Hop(second)], (0, 0, 1, 1)), Route([Hop(first)], None)
    cluster, texts = Cluster(clock), [Done(), Done()]
    cluster.add("both", generate(4, 1, 3, 40.0, texts[0]), route=both)
    cluster.add("one", generate(2, 1, 3, 2e-3, texts[1]), at=25.0, route=one)  # "both" computes for layer 2
    cluster.run()
    assert texts[1].tokens[-1] < 25.0 + 0.1
    assert len(texts[0].tokens) == 3


def test_a_client_is_in_no_walk_at_an_executor_while_its_call_is_under_way() -> None:
    clock = Clock()
    first, second = (_executor(clock, Lockstep()) for _ in range(2))
    both = Route([Hop(first), Hop(second, Link(clock, 0.5), Link(clock))], (0, 0, 1, 1))
    cluster, one = Cluster(clock), Done()
    cluster.add("both", generate(4, 1, 1, 0.0, Done()), route=both)
    cluster.add("one", generate(2, 1, 1, 0.0, one), at=0.1, route=Route([Hop(second)], None))
    cluster.run()
    assert one.tokens[0] < 0.2


def test_targets_are_those_of_a_part() -> None:
    class Seen(NoLockstep):
        lone_at_once = False

        def submitted(self, request: Request) -> None:
            targets.append(request.terms.slo_ms)

    targets: list[float | None] = []
    clock = Clock()
    executor, cluster = _executor(clock, Seen(), fraction=0.25), Cluster(clock)
    cluster.add("a", generate(4, 1, 2, 0.0, Done()), terms=Terms(slo_ms=80.0), route=Route([Hop(executor)]))
    cluster.run()
    assert targets == [20.0] * 8


def test_policies_of_parts_are_told_the_time_in_the_whole_model() -> None:
    class Told(NoLockstep):
        def unloaded(self, seconds: float) -> None:
            times.append(seconds)

    times: list[float] = []
    base, fleet = SimulatedModel.of(MODELS["llama-3.1-8b"]), read_fleet(TWO)
    parts = [[Site("a", range(8))], [Site("b", range(8, 32))]]
    for placement in (Placement([[Site("a", range(32))]]), Placement(parts)):
        place(fleet, placement, base)(Clock(), Told)
    assert times[1:] == pytest.approx([times[0]] * 2, rel=0.05)


def _batch(key: Key, rows: int) -> Batch:
    return Batch(key, [Slice(Request(1, "a", key, rows, Kind.DECODE, 0.0), 0, rows)], "test", rows)


def test_a_shard_computes_its_part_and_sends_rows() -> None:
    fleet = read_fleet({"machines": {"a": {"gpu": "a100", "devices": 4, "gbit_per_s": 800, "latency_us": 10}}})
    base, machine = SimulatedModel.of(MODELS["llama-3.1-8b"]), fleet.machines["a"]
    key = base.walk[2]  # gate and up
    assert base.sent(key, 3) == (2 * 3 * 4096, 2 * 3 * 2 * 14336)
    assert base.sent(Key(key.layers[:1], Pass.BACKWARD), 3) == (2 * 3 * 14336, 2 * 3 * 4096)
    one, two = (base.seconds(machine, shards, _batch(key, 1)) for shards in (1, 2))
    read = 2 * 2 * 4096 * 14336 / (0.7 * 2e12)
    assert one == pytest.approx(read + 10e-6)
    assert two == pytest.approx(read / 2 + 10e-6 + 2 * 10e-6 + (2 * 4096 + 2 * 14336) / 100e9)


@pytest.mark.parametrize("policy", [Opportunistic, Lockstep, CoServing])
def test_placements_serve_all(policy: type[Policy]) -> None:
    """Texts and training steps end in each placement, and only placements on two machines send something."""
    base = SimulatedModel.of(SMALL)
    fleet = read_fleet(TWO)
    sent = {}
    for placement in candidates(fleet, base, None):
        load = ReplayedLoad([Arrival(number / 1000, 8, 4) for number in range(12)], tuning=2, rows=64)
        found = replay(policy, base.costs(GPUS["a100"]), load, SLO(1e6, 1e6), place=place(fleet, placement, base))
        assert found.finished == 12
        assert found.finetune_per_s > 0
        sent[placement.text()] = found.sent
    assert {name: size > 0 for name, size in sent.items()} == {
        "one executor": False,
        "2 replicas": False,
        "2 parts": True,
    }


def test_what_devices_hold() -> None:
    """Parts, shards and replicas hold what the model and its tenants have, once each, and the embedding once for each
    executor and each place of clients."""
    base, tenants = SimulatedModel.of(SMALL), TenantWork(6, 2, 100, 32, 8)
    fleet = read_fleet({"machines": {"a": {"gpu": "a100", "devices": 2, "count": 2}}, "links": [{"gbit_per_s": 1}]})
    all_weights = 2 * base.weights(range(len(base.sizes)))
    lora = 8 * 4 * (64 + 64 + 64 + 32 + 64 + 32 + 64 + 64)
    for placement in candidates(fleet, base, None):
        needed = needs(fleet, base, tenants, placement)
        total = {
            purpose: sum(device.get(purpose, 0) for devices in needed.values() for device in devices)
            for purpose in ("weights", "caches", "adapters", "embedding")
        }
        replicas = len(placement.parts[0])
        assert total["weights"] == pytest.approx(all_weights * replicas)
        assert total["caches"] == 6 * 100 * 2 * 2 * 32 * 4
        assert total["adapters"] == 4 * lora * (6 + 4 * 2)
        assert total["embedding"] == 2 * 64 * 1000 * (len(placement.sites()) + replicas)
        assert fits(fleet, needed) is None


def test_tenants_on_another_machine_are_spread_over_its_devices() -> None:
    base, tenants = SimulatedModel.of(SMALL), TenantWork(6, 0, 100, 32, 8)
    machines = {"a": {"gpu": "a100"}, "workers": {"gpu": "a100", "devices": 3}}
    fleet = read_fleet({"machines": machines, "links": [{"gbit_per_s": 1}]})
    for placement in candidates(fleet, base, "workers"):
        needed = needs(fleet, base, tenants, placement)
        free = [device for device in needed["workers"] if "weights" not in device]
        assert len({device["caches"] for device in free}) == 1
        assert sum(device.get("caches", 0) for device in needed["workers"]) == 6 * 100 * 2 * 2 * 32 * 4


def test_what_does_not_fit() -> None:
    base = SimulatedModel.of(MODELS["qwen2.5-32b"])
    fleet = read_fleet({"machines": {"a": {"gb_per_s": 2000, "tflops": 300, "memory_gib": 40, "devices": 2}}})
    found = plan(fleet, base, TenantWork(4, 0, 100, 32, 8), Opportunistic)
    assert {each.placement.text() for each in found if each.problem is None} == {"2 parts", "2 shards"}
    assert found[-1].problem is not None
    assert "a device of a needs" in found[-1].problem


def test_a_placement_that_cannot_keep_a_latency_target_is_left_out() -> None:
    base = SimulatedModel.of(MODELS["qwen2.5-32b"])
    fleet = read_fleet({"machines": {"a": {"gb_per_s": 2000, "tflops": 300, "memory_gib": 40, "devices": 2}}})
    found = plan(fleet, base, TenantWork(4, 0, 100, 32, 8), lambda: CoServing(slo_ms=30))
    assert [each.placement.text() for each in found if each.problem is None] == ["2 shards"]
    (problem,) = [each.problem for each in found if each.placement.text() == "2 parts"]
    assert problem is not None
    assert "one token takes" in problem


def test_a_small_model_has_rates() -> None:
    """All tenants have done enough after the first events."""
    work = [TenantWork(1, 0, 100, 32, 8), TenantWork(2, 1, 100, 32, 8)]
    for found in (plan(read_fleet(ONE_GPU), SimulatedModel.of(SMALL), each, Opportunistic) for each in work):
        assert found[0].rates is not None
        assert found[0].rates.decode_per_s > 0


@pytest.mark.parametrize("work", [(1, 0, 1), (0, 1, 512), (0, 3, 512), (4, 1, 4096)])
def test_rates_are_those_of_a_long_run(work: tuple[int, int, int]) -> None:
    """They were counted over parts of tokens and steps: up to a quarter off, and not the rate of a token's time."""
    decode, tuned, rows = work
    fleet, base = read_fleet(ONE_GPU), SimulatedModel.of(MODELS["llama-3.1-8b"])
    placement = Placement([[Site("a", range(32))]])
    rates = simulated(fleet, placement, base, TenantWork(decode, tuned, 10, rows, 8), Opportunistic)

    clock = Clock()
    cluster, costs = Cluster(clock), base.costs(fleet.machines["a"].device)
    route = place(fleet, placement, base)(clock, Opportunistic).routes[0]
    texts, jobs = [Done() for _ in range(decode)], [Done() for _ in range(tuned)]
    for number, done in enumerate(texts):
        cluster.add(f"t{number}", generate(costs.walk, 8, 1000, costs.think, done, last=costs.last), route=route)
    for number, done in enumerate(jobs):
        cluster.add(f"j{number}", finetune(costs.walk, rows, costs.think, done, back=costs.back), route=route)
    while any(len(done.steps) < 6 for done in jobs) or any(len(done.tokens) < 30 for done in texts):
        cluster.step()
    begin = max([done.tokens[1] for done in texts] + [done.steps[0] for done in jobs])
    seconds = min([done.tokens[-1] for done in texts] + [done.steps[-1] for done in jobs]) - begin
    tokens = [time for done in texts for time in done.tokens if begin < time <= begin + seconds]
    assert rates.decode_per_s == pytest.approx(len(tokens) / seconds, rel=0.1)
    assert rates.finetune_per_s == pytest.approx(sum(rows * 5 / (j.steps[5] - j.steps[0]) for j in jobs), rel=0.02)
    if decode:
        assert rates.token_ms == pytest.approx(1e3 * decode / rates.decode_per_s, rel=0.01)


def test_a_token_over_a_link() -> None:
    base, fleet = SimulatedModel.of(SMALL), read_fleet(PARTS)
    placement = read_placement(PARTS, fleet, 4)
    sent = sum(sum(base.sent(key, 1)) for key in base.walk if base.of_block[key.layers[0]] >= 2)
    assert traffic(placement, base) == {("a", "b"): sent}
    load = ReplayedLoad([Arrival(0.0, 1, 3)])
    found = replay(NoLockstep, base.costs(GPUS["a100"]), load, SLO(1e6, 1e6), place=place(fleet, placement, base))
    assert found.sent == 3 * sent


def test_a_slower_link_makes_slower_tokens() -> None:
    base, rates = SimulatedModel.of(SMALL), []
    for latency in (10, 1000):
        fleet = read_fleet({**PARTS, "links": [{"gbit_per_s": 80, "latency_us": latency}]})
        found = simulated(fleet, read_placement(PARTS, fleet, 4), base, TenantWork(2, 1, 10, 32, 8), Opportunistic)
        rates.append(found)
    # a token of the second half has four calls for each of two blocks and one for the head, there and back
    assert rates[1].token_ms - rates[0].token_ms == pytest.approx(9 * 2 * 0.99, rel=0.2)
    assert rates[1].finetune_per_s < rates[0].finetune_per_s


@pytest.mark.parametrize("slow", ["a", "b"])
def test_replicas_behind_different_links_have_different_rates(slow: str) -> None:
    """Their machines are equal, so they were taken to be alike."""
    base = SimulatedModel.of(SMALL)

    def decoded(*slow_ones: str) -> float:
        links = [
            {"between": ["c", name], "gbit_per_s": 0.01 if name in slow_ones else 400, "latency_us": 10}
            for name in ("a", "b")
        ]
        fleet = read_fleet({"machines": {name: {"gpu": "a100"} for name in "abc"}, "links": links})
        replicas = Placement([[Site("a", range(4)), Site("b", range(4))]], "c")
        return simulated(fleet, replicas, base, TenantWork(4, 0, 10, 64, 8), Opportunistic).decode_per_s

    assert decoded(slow) == pytest.approx((decoded() + decoded("a", "b")) / 2)


def test_replicas_whose_parts_share_a_link_are_not_those_with_a_link_for_each_part() -> None:
    fleet = read_fleet(
        {"machines": {name: {"gpu": "a100", "devices": 3} for name in "abcdef"}, "links": [{"gbit_per_s": 0.1}]}
    )
    base = SimulatedModel.of(SMALL)

    def decoded(*replicas: str) -> float:
        """Return the rate of replicas with parts on these machines, each a letter."""
        parts = [[Site(name, range(n, n + 1)) for name in names] for n, names in enumerate(zip(*replicas, strict=True))]
        tenants = TenantWork(8 * len(replicas), 0, 10, 64, 8)
        return simulated(fleet, Placement(parts), base, tenants, Opportunistic).decode_per_s

    shared, apart = decoded("abbb"), decoded("cdef")
    assert shared < 0.8 * apart
    for replicas in (("abbb", "cdef"), ("cdef", "abbb")):
        assert decoded(*replicas) == pytest.approx(shared + apart)


def test_many_executors() -> None:
    fleet = read_fleet({"machines": {"a": {"gpu": "a100", "count": 64}}, "links": [{"gbit_per_s": 100}]})
    base = SimulatedModel.of(SMALL)
    found = simulated(
        fleet,
        Placement([[Site(name, range(4)) for name in fleet.machines]]),
        base,
        TenantWork(2000, 0, 10, 32, 8),
        NoLockstep,
    )
    one = simulated(
        read_fleet(ONE_GPU), Placement([[Site("a", range(4))]]), base, TenantWork(31, 0, 10, 32, 8), NoLockstep
    )
    assert found.decode_per_s == pytest.approx(64 * one.decode_per_s, rel=0.1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "the file has no machine"),
        ({**ONE_GPU, "executor": []}, "the file: executor is not known; there are machines, links"),
        ({"machines": {"a": {"gpu": "b100"}}}, r"\[machines\.a\]: no figures for gpu = 'b100'; there are a100"),
        ({"machines": {"a": {"gpu": ["a100"]}}}, r"no figures for gpu = \['a100'\]"),
        ({"machines": {"a": {"gpu": "a100", "count": 2}, "a-0": {"gpu": "a100"}}}, "two machines are called a-0"),
        ({"machines": {"a": {"gpu": "a100", "cores": 3}}}, "cores is not known; there are gpu"),
        ({"machines": {"a": {"gb_per_s": 100}}}, "tflops is missing"),
        ({"machines": {"a": {"gb_per_s": 1, "tflops": 1}}}, "memory_gib is missing"),
        ({"machines": {"a": {"gpu": "a100", "count": 0}}}, "count is 0; it must be a whole number"),
        ({"machines": {"a": {"gpu": "a100", "memory_gib": -1}}}, "memory_gib is -1; it must be a number"),
        ({"machines": {"a": {"gpu": "a100"}}, "links": {}}, r"write \[\[links\]\]"),
        ({**TWO, "links": [{"between": ["a"], "gbit_per_s": 1}]}, "between has two names"),
        ({**TWO, "links": [{"between": ["a", "c"], "gbit_per_s": 1}]}, "there is no machine 'c'"),
        ({**TWO, "links": [{"between": [["a"], "b"], "gbit_per_s": 1}]}, r"there is no machine \['a'\]"),
        ({**TWO, "links": [{"between": ["a", "b"]}]}, "gbit_per_s is missing"),
    ],
)
def test_bad_machines(data: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_fleet(data)


@pytest.mark.parametrize(
    ("executors", "why"),
    [
        ([], "the file has no executor"),
        ([{"machine": "c"}], "there is no machine 'c'"),
        ([{"machine": "a", "layers": "0-1"}], "blocks 2 to 3 are served nowhere"),
        ([{"machine": "a", "layers": "2-3,lm_head"}], "blocks 0 to 1 are served nowhere"),
        ([{"machine": "a"}, {"machine": "b", "layers": "2-3,lm_head"}], "block 2 is served twice"),
        ([{"machine": "a", "layers": "0-3"}], "lm_head belongs to the executor of block 3"),
        ([{"machine": "a", "layers": "0-9"}], "the model has blocks 0 to 3"),
        ([{"machine": "a", "layers": "9" * 5000}], "write blocks such as 0-15"),
        ([{"machine": "a", "layers": "all"}], "write blocks such as 0-15"),
    ],
)
def test_bad_placements(executors: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_placement({"executors": executors}, read_fleet(TWO), 4)


@pytest.mark.parametrize("clients", ["c", ["a"]])
def test_clients_on_an_unknown_machine(clients: Any) -> None:
    with pytest.raises(UsageError, match="clients: there is no machine"):
        read_placement({"executors": [{"machine": "a"}], "clients": clients}, read_fleet(TWO), 4)


def test_a_missing_link_is_named() -> None:
    fleet = read_fleet({"machines": TWO["machines"]})
    with pytest.raises(UsageError, match="there is no link between a and b"):
        place(fleet, read_placement(PARTS, fleet, 4), SimulatedModel.of(SMALL))


def test_shapes_of_checkpoints(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert shape_of(str(tmp_path)) == SMALL
    file.write_text(json.dumps({"text_config": {**config, "head_dim": 32, "tie_word_embeddings": True}}))
    assert shape_of(str(tmp_path)) == LlamaShape(64, 128, 4, 4, 2, 1000, True, 32)
    for wrong, why in (
        ({**config, "num_experts": 8}, "no figures for experts"),
        ({**config, "vocab_size": None}, "has no vocab_size"),
        ({**config, "num_key_value_heads": "x"}, "num_key_value_heads is 'x'; it must be a whole number"),
        ({"text_config": []}, "is not the configuration of a model"),
        ([], "is not the configuration of a model"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match=why):
            shape_of(str(tmp_path))


def test_weights_are_those_of_the_model() -> None:
    """The shape of Llama has the weights that transformers gives it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=1000,
            )
        )
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    base = SimulatedModel.of(SMALL)
    assert base.weights(range(len(base.sizes))) == sum(layer.weight.numel() for layer in layers)
    assert sorted(base.sizes) == sorted((layer.in_features, layer.out_features) for layer in layers)
    assert forward(2)[0] == Key((0,), Pass.FORWARD)


FILE = """
[machines.gpu]
gpu = "a100"
count = 2

[[links]]
gbit_per_s = 100
latency_us = 15
"""


def test_the_command(tmp_path: Path) -> None:
    machines, out = tmp_path / "machines.toml", tmp_path / "plan.json"
    machines.write_text(FILE)
    found = command(
        *("plan", "llama-3.1-8b", "--machines", str(machines), "--tenants", "2 decode, 1 finetune"),
        *("--json", str(out)),
    )
    assert found.exit_code == 0, found.output
    data = json.loads(out.read_text())
    placements = {each["placement"]: each for each in data["placements"]}
    assert placements.keys() == {"one executor", "2 replicas", "2 parts"}
    assert data["simulated"] is True
    assert placements["2 parts"]["executors"][1] == {"machine": "gpu-1", "layers": "16-31,lm_head", "shards": 1}
    assert placements["2 parts"]["bytes_per_token"][0]["bytes"] > 1e6
    assert all(each["rates"]["decode_per_s"] > 1 for each in placements.values())
    assert "A decoded token sends nothing over links" in found.output
    assert "rates are simulated" in found.output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--tenants", "many"), "--tenants 'many': write numbers"),
        (("--tenants", "2 decode, 3 decode"), "write numbers"),
        (("--tenants", f"{'9' * 5000} decode"), "write numbers"),
        (("--clients", "cpu"), "--clients cpu: there is no such machine; there are gpu-0, gpu-1"),
        (("--policy", "none"), "none"),
        (("--policy", "co-serving:slo_ms=1"), "slo_ms is 1, but one token takes"),
    ],
)
def test_mistakes(tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    machines = tmp_path / "machines.toml"
    machines.write_text(FILE)
    found = command("plan", "llama-3.1-8b", "--machines", str(machines), *options)
    assert found.exit_code == 1, found.output
    assert why in " ".join(found.output.split())


def test_simulate_on_a_placement(tmp_path: Path) -> None:
    file, out = tmp_path / "placement.toml", tmp_path / "found.json"
    file.write_text(
        f'clients = "gpu-0"\n{FILE}\n[[executors]]\nmachine = "gpu-0"\nlayers = "0-15"\n'
        '[[executors]]\nmachine = "gpu-1"\nlayers = "16-31,lm_head"\n'
    )
    options = "--requests", "2", "--lengths", "0.05", "--policy", "opportunistic"
    found = command("simulate", "--placement", str(file), *options, "--json", str(out))
    assert found.exit_code == 0, found.output
    data = json.loads(out.read_text())
    assert data["costs"] == "llama-3.1-8b, 2 parts of placement.toml"
    assert data["placement"] == str(file)
    assert data["policies"]["opportunistic"]["predicted"]["sent"] > 0
    refused = command("simulate", "--placement", str(file), "--machine", "h100")
    assert refused.exit_code == 1
    assert "--machine has no effect here: the file has its machines" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("executors", "why"),
    [
        ('machine = "gpu-0"\n[[executors]]\nmachine = "gpu-0"', "gpu-0 needs 2 devices and has 1"),
        ('machine = "gpu-0"\nshards = 2', "gpu-0 needs 2 devices and has 1"),
        ('machine = "small"', "a device of small needs 16 GiB and has 10"),
    ],
    ids=["two executors", "two shards", "memory"],
)
def test_placements_that_do_not_fit(tmp_path: Path, executors: str, why: str) -> None:
    file = tmp_path / "placement.toml"
    file.write_text(f'{FILE}[machines.small]\ngpu = "a100"\nmemory_gib = 10\n[[executors]]\n{executors}\n')
    refused = command("simulate", "--placement", str(file), "--requests", "2", "--lengths", "0.05")
    assert refused.exit_code == 1
    assert f"llama-3.1-8b does not fit: {why}" in " ".join(refused.output.split())
