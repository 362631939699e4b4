"""How a fine-tuning job goes on after its actor was lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra symbiosis-peft[ray]")

from symbiosis.cluster import jobs
from symbiosis.errors import BrokenError, ConnectionLostError


@pytest.mark.parametrize("lost", [False, True])
def test_a_lost_run_is_the_same_command_once_executors_answer(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    context = SimpleNamespace(was_current_actor_reconstructed=lost)
    monkeypatch.setattr(jobs, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    follow = SimpleNamespace(
        start=lambda arguments, cwd: done.append((arguments, cwd)), follow=lambda child: (0, "end")
    )
    monkeypatch.setattr(jobs, "child", follow)
    monkeypatch.setattr(jobs, "await_executors", lambda *given: done.append(given))
    job = {"arguments": ["--job", "1"], "folder": "/f", "address": "tcp://a:1", "options": {}, "retry": 7e3}
    assert jobs.FineTuning().run(job) == (0, "end")
    assert done == [("tcp://a:1", {}, 7e3)] * lost + [(["finetune", "--job", "1"], "/f")]


def test_a_dashboard_that_does_not_answer_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(value="SUCCEEDED")
    answers = iter(
        [OSError("refused"), RuntimeError("503"), ended, OSError("refused"), ended, "done", OSError("refused")]
    )

    def answer(job: str) -> Any:
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    client = SimpleNamespace(get_job_status=answer, get_job_logs=answer)
    monkeypatch.setattr(jobs, "_client", lambda dashboard: client)
    monkeypatch.setattr(jobs, "LOOK_EVERY_S", 0.0)
    assert jobs.wait("http://head:8265", "1", lambda state: None) == (True, "done")
    monkeypatch.setattr(jobs, "SILENT_S", -1.0)
    with pytest.raises(BrokenError, match="the job may go on; ray job status 1"):
        jobs.wait("http://head:8265", "1", lambda state: None)


def test_a_run_that_was_lost_waits_for_executors_that_were_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ConnectionLostError("gone"), {"replicas": {"tcp://a:1": {}, "tcp://b:1": {"error": "gone"}}}, {}])

    def look(address: str) -> SimpleNamespace:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return SimpleNamespace(status=answer)

    monkeypatch.setattr(jobs, "make_transport", lambda address, **options: SimpleNamespace(look=look))
    monkeypatch.setattr(jobs, "LOOK_EVERY_S", 0.0)
    jobs.await_executors("http://head:7070/llama", {}, 20.0)
    assert next(answers, None) is None
    jobs.await_executors("http://head:7070/llama", {}, 0.0)
