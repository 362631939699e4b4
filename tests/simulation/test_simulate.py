"""Tests of traces and replays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from symbiosis.core.requests import Batch, Key, Pass, Request, Slice
from symbiosis.core.terms import JOINT, Kind
from symbiosis.errors import UsageError
from symbiosis.policies import CoServing, Lockstep, NoLockstep, Opportunistic
from symbiosis.simulation import Cost, Done, Simulation, generate
from symbiosis.simulation.clients import backward, forward
from symbiosis.simulation.costs import roofline
from symbiosis.simulation.outcome import SLO, outcome, percentile
from symbiosis.simulation.replay import ReplayedLoad, replay, replicas
from symbiosis.simulation.trace import COLUMNS, Arrival, read_trace, scaled
from tests.simulation.made_up import PATIENT, costs, trace_file

# -------------------------------------------------------------------------------------------------------------- traces


def test_a_trace_is_read(tmp_path: Path) -> None:
    file = trace_file(
        tmp_path, "x,0.0,7,3", "y,1.5,0,1", "z,2,9,0", header="id,arrival_s,ContextTokens,GeneratedTokens"
    )
    assert read_trace(file) == [Arrival(0.0, 7, 3), Arrival(1.5, 1, 1)]  # requests that generate nothing are left out
    assert read_trace(file, 1) == [Arrival(0.0, 7, 3)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("soon,1,1", "line 3: arrival_s is 'soon'; it must be seconds"),
        ("1,1.5,1", "line 3: ContextTokens is '1.5'; it must be a whole number of tokens"),
        ("1,1", "line 3: GeneratedTokens is missing; a row has arrival_s, ContextTokens, GeneratedTokens"),
        ("1, ,1", "line 3: ContextTokens is missing"),
        ("nan,1,1", "line 3: arrival_s is 'nan'"),
        ("inf,1,1", "line 3: arrival_s is 'inf'"),
        ("5,-1,1", "line 3: ContextTokens is '-1'"),
        ("5,inf,1", "line 3: ContextTokens is 'inf'"),
        ("5,1,9999999", "line 3: GeneratedTokens is '9999999'; .* 0 to 1000000"),
        ("-1,1,1", "line 3: arrival_s is '-1'"),
    ],
)
def test_a_bad_trace(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_trace(trace_file(tmp_path, "1,1,1", line))


def test_a_trace_in_another_notation(tmp_path: Path) -> None:
    """Names and values may have spaces around them, and whole numbers may have a decimal point."""
    file = trace_file(tmp_path, "0.0, 7.0 ,3", "1.5 ,1, 2e1", header='arrival_s , ContextTokens,  "GeneratedTokens"')
    assert read_trace(file) == [Arrival(0.0, 7, 3), Arrival(1.5, 1, 20)]


def test_a_trace_with_dates_as_azures(tmp_path: Path) -> None:
    """Timestamps may have seven digits of a second, and no time zone or an offset."""
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    lines = "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:45.5,1,2", "2023-11-16T19:15:47+01:00,3,4"
    found = read_trace(trace_file(tmp_path, *lines, header=header))
    assert found == [Arrival(0.0, 1, 2), Arrival(pytest.approx(1.18059), 374, 44), Arrival(1.5, 3, 4)]
    with pytest.raises(UsageError, match="line 2: TIMESTAMP is 'soon'; it must be a date and a time"):
        read_trace(trace_file(tmp_path, "soon,1,1", header=header))
    with pytest.raises(UsageError, match="line 2: TIMESTAMP is missing; a row has TIMESTAMP, Con"):
        read_trace(trace_file(tmp_path, ",1,1", header=header))
    both = trace_file(tmp_path, "never,1.0,7,3", "never,2.0,7,3", header=f"TIMESTAMP,{','.join(COLUMNS)}")
    assert [arrival.at for arrival in read_trace(both)] == [0.0, 1.0]


def test_a_trace_after_empty_lines(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("\n  \n" + trace_file(tmp_path, "0,7,3", "x,1,1").read_text())
    with pytest.raises(UsageError, match="line 5: arrival_s is 'x'"):
        read_trace(file)


def test_a_trace_in_another_order(tmp_path: Path) -> None:
    """Requests with equal times stay in the order of the file; a limit takes the earliest of all requests."""
    file = trace_file(tmp_path, "12,1,1", "10,2,2", "11,3,3", "10,4,4")
    ordered = [Arrival(0.0, 2, 2), Arrival(0.0, 4, 4), Arrival(1.0, 3, 3), Arrival(2.0, 1, 1)]
    assert read_trace(file) == ordered
    assert read_trace(file, 3) == ordered[:3]


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no column 'ContextTokens'"):
        read_trace(trace_file(tmp_path, header="arrival_s,tokens"))
    with pytest.raises(UsageError, match="no request"):
        read_trace(trace_file(tmp_path))
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "missing.csv")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(UsageError):
        read_trace(tmp_path / "binary")


def test_scaled() -> None:
    assert scaled([Arrival(10.0, 100, 3)], speed=2, lengths=0.1) == [Arrival(5.0, 10, 1)]
    assert scaled([Arrival(0.0, 100, 3)], lengths=1e4) == [Arrival(0.0, 1_000_000, 30_000)]
    for longest in (Arrival(0.0, 100, 3), Arrival(0.0, 3, 100)):
        with pytest.raises(UsageError, match="lengths is 20000, and the longest text has 100 tokens"):
            scaled([longest], lengths=2e4)


# ------------------------------------------------------------------------------------------------------------- replays


def test_one_request_takes_the_sum_of_its_costs() -> None:
    """Each of 4 layers takes 1 ms + 10 us a row, and 1 ms of own work: 8.4 ms for a prompt of 10 tokens, then 8.04 ms a
    token.
    """
    found = replay(NoLockstep, costs(), ReplayedLoad([Arrival(2.0, 10, 5)]), PATIENT)
    assert found.first_mean == pytest.approx(8.4)
    assert found.token_p50 == found.token_p99 == pytest.approx(8.04)
    assert found.seconds == pytest.approx(2.0084 + 4 * 0.00804)
    assert (found.finished, found.slo_attainment, found.fairness, found.mean_batch) == (1, 1.0, 1.0, 1.0)


def test_clients_serve_one_request_at_a_time() -> None:
    trace = [Arrival(0.0, 1, 2), Arrival(0.0, 1, 2), Arrival(9.0, 1, 2)]
    assert replay(NoLockstep, costs(), ReplayedLoad(trace, clients=1, paced=False), PATIENT).seconds < 0.06
    paced = replay(NoLockstep, costs(), ReplayedLoad(trace, clients=1), PATIENT)
    assert paced.seconds == pytest.approx(9.0 + 2 * 0.00804)
    assert paced.first_mean == pytest.approx((8.04 + 24.12 + 8.04) / 3)  # the second waits for the first


def test_two_executors_serve_twice_as_many_requests() -> None:
    load = ReplayedLoad([Arrival(0.0, 1, 50)] * 16)
    times = costs(think=1e-5)
    one, two = (replay(NoLockstep, times, load, PATIENT, place=replicas(times, count)) for count in (1, 2))
    assert two.tokens_per_s == pytest.approx(2 * one.tokens_per_s, rel=0.05)


def test_fine_tuning_runs_until_the_last_text() -> None:
    found = replay(Opportunistic, costs(), ReplayedLoad([Arrival(0.0, 1, 200)], tuning=2, rows=64), PATIENT)
    assert found.finished == 1
    assert found.finetune_per_s > 0


def test_batching_pays_if_the_cost_of_a_batch_is_fixed() -> None:
    load = ReplayedLoad([Arrival(0.0, 1, 20)] * 8)
    alone, together = (replay(policy, costs(think=1e-4), load, PATIENT) for policy in (NoLockstep, Lockstep))
    assert together.tokens_per_s > 4 * alone.tokens_per_s
    assert together.mean_batch == pytest.approx(8)


def test_local_clients_share_one_processor() -> None:
    """8 clients think for 1 ms before each of 4 layers: 4 ms a token in separate processes, 32 ms in one process."""
    load = ReplayedLoad([Arrival(0.0, 1, 20)] * 8)
    apart, local = (replay(Lockstep, costs(start=1e-6, local=here), load, PATIENT) for here in (False, True))
    assert apart.token_mean == pytest.approx(4, rel=0.2)
    assert local.token_mean == pytest.approx(32, rel=0.05)


def test_clients_decode_jointly() -> None:
    """The 8 prompts are read one by one, as no policy gathers them. Then each of 4 layers takes 1 ms of work for all
    clients together, and 1.08 ms for their 8 rows.
    """
    load = ReplayedLoad([Arrival(0.0, 1, 21)] * 8)
    found = replay(NoLockstep, costs(local=True, joint=True), load, PATIENT)
    assert found.token_p50 == pytest.approx(8.32)
    assert found.seconds == pytest.approx(8 * 4 * 2.01e-3 + 20 * 8.32e-3, rel=0.05)
    assert found.mean_batch == pytest.approx(24 * 21 / (24 + 3 * 20), rel=0.2)


def test_a_client_that_decodes_alone_waits_for_nobody() -> None:
    load = ReplayedLoad([Arrival(0.0, 10, 5)])
    alone, joint = (replay(NoLockstep, costs(local=True, joint=here), load, PATIENT) for here in (False, True))
    assert alone == joint


class _Seen(NoLockstep):
    """Notes requests, and keeps some clients out of joint walks."""

    lone_at_once = False

    def __init__(self, kept_out: str = "") -> None:
        super().__init__()
        self.requests: list[Request] = []
        self._kept_out = kept_out

    def submitted(self, request: Request) -> None:
        self.requests.append(request)
        super().submitted(request)

    def may_join(self, client: str, now: float) -> bool:
        return client != self._kept_out


def test_a_token_begins_for_all_who_are_ready() -> None:
    """The first client decodes a token while the second reads its prompt, and the third arrives during a token of both.
    Each joins at the next token. When the others have left, the last one walks alone.
    """
    policy = _Seen()
    simulation = Simulation(policy, layers=2, cost=Cost(1e-3, 0.0).of, joint=True)
    texts = {name: Done() for name in ("a", "b", "c")}
    for name, tokens, at in (("a", 6, 0.0), ("b", 6, 0.0), ("c", 8, 11e-3)):
        simulation.add(name, generate(2, 1, tokens, 2e-3, texts[name], at), at)
    simulation.run()
    walks = [request for request in policy.requests if request.key.layers == (0,) and request.kind is Kind.DECODE]
    together = ["".join(sorted(request.clients)) for request in walks]
    assert together == ["a", "ab", "ab", "abc", "abc", "bc", "c", "c", "c", "c"]
    assert [request.client == JOINT for request in walks] == [len(names) > 1 for names in together]
    assert [len(done.tokens) for done in texts.values()] == [6, 6, 8]


def test_a_client_that_the_policy_keeps_out_walks_alone() -> None:
    policy = _Seen("b")
    simulation = Simulation(policy, layers=2, cost=Cost(1e-3, 0.0).of, joint=True)
    for name in ("a", "b", "c"):
        simulation.add(name, generate(2, 1, 4, 2e-3, Done()))
    simulation.run()
    decoding = [request for request in policy.requests if request.kind is Kind.DECODE]
    assert sum(request.client == "b" for request in decoding) == 2 * 3
    assert {"".join(sorted(request.joint or ())) for request in decoding} == {"", "ac"}


def test_slos_are_counted() -> None:
    load = ReplayedLoad([Arrival(0.0, 1, 20)] * 8)
    within = replay(NoLockstep, costs(), load, SLO(100, 100))
    late = replay(NoLockstep, costs(), load, SLO(5, 100))
    assert (within.slo_attainment, late.slo_attainment) == (1.0, 0.0)


def test_figures() -> None:
    even, odd = Done(0.0, [1.0, 2.0, 3.0]), Done(0.0, [1.0, 4.0, 9.0])
    job = Done(tuned=200.0)
    found = outcome(
        [(done, Arrival(0.0, 1, 3)) for done in (even, odd, Done(0.0, [5.0]))], [job], 10.0, 2.5, SLO(1000, 2000)
    )
    assert (found.tokens_per_s, found.finetune_per_s, found.finished) == (0.7, 20.0, 2)
    assert found.slo_attainment == 0.5
    assert found.fairness == pytest.approx((1 + 1 / 3) ** 2 / (2 * (1 + 1 / 9)))
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    hundred = [float(number) for number in range(1, 101)]
    assert [percentile(hundred, part) for part in (0.0, 0.07, 0.5, 0.99, 1.0)] == [1.0, 7.0, 50.0, 99.0, 100.0]


def test_a_backward_pass_requests_siblings_one_by_one() -> None:
    walk = [Key((0, 1), Pass.FORWARD), Key((2,), Pass.FORWARD)]
    assert backward(walk) == [Key((layer,), Pass.BACKWARD) for layer in (2, 1, 0)]


def _batch(key: Key, rows: int) -> Batch:
    return Batch(key, [Slice(Request(1, "a", key, rows, Kind.DECODE, 0.0), 0, rows)], "test", rows)


def test_a_roofline() -> None:
    """An 8B model runs on an A100: a token's walk reads 2 bytes of each of its 6.98 billion linear weights."""
    costs = roofline("a100", "llama-3.1-8b")
    walk = sum(costs.batch(_batch(key, 1)) for key in costs.walk)
    assert len(costs.walk) == 4 * 32
    assert walk == pytest.approx(2 * 6.98e9 / (0.7 * 2e12) + 128 * 10e-6, rel=0.01)
    assert costs.batch(_batch(costs.walk[0], 64)) == costs.batch(_batch(costs.walk[0], 1))
    assert costs.batch(_batch(costs.walk[0], 4096)) > 10 * costs.batch(_batch(costs.walk[0], 1))
    with pytest.raises(UsageError, match=r"gpt is neither a folder with a config\.json nor one of"):
        roofline("a100", "gpt")
    with pytest.raises(UsageError, match="no figures for b200; there are a100, h100"):
        roofline("b200", "llama-3.1-8b")


def test_thousands_of_clients() -> None:
    load = ReplayedLoad([Arrival(number / 1000, 8, 3) for number in range(3000)])
    found = replay(lambda: CoServing(slo_ms=50), costs(), load, SLO(50, 5000), place=replicas(costs(), 3))
    assert found.finished == 3000


def test_own_work_in_seconds_per_walk() -> None:
    """A client's own work may be given in seconds per walk."""
    simulation = Simulation(NoLockstep(), layers=4, cost=Cost(0.0, 0.0).of)
    done = Done()
    think: float | Callable[[Kind, int], float] = 4e-3
    simulation.add("a", generate(4, 1, 3, think, done))
    simulation.run()
    assert done.tokens == pytest.approx([4e-3, 8e-3, 12e-3])


def test_a_trace_may_begin_at_any_time(tmp_path: Path) -> None:
    """A spreadsheet may have saved the trace."""
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,ContextTokens,GeneratedTokens\n100000.5,3,4\n100001.5,5,6\n", encoding="utf-8-sig")
    assert read_trace(file) == [Arrival(0.0, 3, 4), Arrival(1.0, 5, 6)]


def test_the_head_is_requested_for_the_last_token_of_a_prompt() -> None:
    seen: list[tuple[Key, int]] = []

    class Notes(NoLockstep):
        lone_at_once = False

        def submitted(self, request: Request) -> None:
            seen.append((request.key, request.rows))
            super().submitted(request)

    keys = forward(3)
    simulation = Simulation(Notes(), layers=3, cost=Cost(1e-3, 0.0).of)
    simulation.add("text", generate(keys, 5, 2, 0.0, Done(), last={keys[-1]}))
    simulation.run()
    assert seen == [*zip(keys, (5, 5, 1), strict=True), *((key, 1) for key in keys)]
