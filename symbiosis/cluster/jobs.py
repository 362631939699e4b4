"""Fine-tuning as a job of Ray that goes on at another node.

The job's driver runs beside Ray's head (``python -m symbiosis.cluster.jobs``). It starts an actor, which runs
``symbiosis finetune``. When the actor, its run or its node is lost, Ray starts the actor again. The same command then
finds its own run by the id of the job (``--job``), and resumes it or begins it again. So the folder of ``--output`` has
to be on a file system that all nodes share.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

import ray

from symbiosis.core.registry import make_transport
from symbiosis.errors import BrokenError, SymbiosisError, UsageError
from symbiosis.terminal import child

RESTARTS = 10
"""Times that a run may be lost before the job fails."""
AWAIT_S = 600.0
"""Seconds for which a run that was lost waits for executors at least. Large models take minutes to load."""
LOOK_EVERY_S = 0.5
SILENT_S = 60.0
"""Seconds of errors at Ray's dashboard after which :func:`wait` ends."""


class FineTuning:
    """One run of ``symbiosis finetune``."""

    def run(self, job: dict[str, Any]) -> tuple[int, str]:
        """Return the exit status and the last lines of the run."""
        if ray.get_runtime_context().was_current_actor_reconstructed:
            await_executors(job["address"], job["options"], max(job["retry"], AWAIT_S))
        status, last = child.follow(child.start(["finetune", *job["arguments"]], cwd=job["folder"]))
        if status < 0:  # a signal ended it
            os._exit(1)  # Ray starts the actor again
        return status, last


def await_executors(address: str, options: dict[str, Any], within_s: float) -> None:
    """Wait until executors at these addresses answer: those on a node that is lost load the model elsewhere first, and
    a run that begins does not wait for them. After ``within_s`` seconds, the run is left to say what is missing."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        with contextlib.suppress(SymbiosisError):
            replicas = make_transport(address, **options).look(address).status.get("replicas", {})
            if not any("error" in state for state in replicas.values()):
                return
        time.sleep(LOOK_EVERY_S)


def main() -> None:
    """Run the fine-tuning that the first argument describes, as JSON: ``arguments`` of the command, the ``folder`` in
    which it runs, the ``address`` of its executors with the transport's ``options`` and the seconds of ``retry``, and
    what Ray reserves for it."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    options = {"num_cpus": job["num_cpus"], "num_gpus": job["num_gpus"]}
    actor: Any = ray.remote(FineTuning).options(**options, max_restarts=RESTARTS, max_task_retries=RESTARTS).remote()
    status, last = ray.get(actor.run.remote(job))
    sys.stdout.write(f"{last}\n")
    sys.exit(status)


def submit(dashboard: str, job: dict[str, Any]) -> str:
    """Submit a job to the Ray whose dashboard is at a URL, and return its id.

    Raises:
        UsageError: there are no jobs at that URL.
    """
    command = shlex.join([sys.executable, "-m", __spec__.name, json.dumps(job)])
    try:
        return str(_client(dashboard).submit_job(entrypoint=command))
    except (ConnectionError, RuntimeError) as error:
        raise UsageError(
            f"no jobs of Ray at {dashboard}: {error}; install ray[default] on the head node, and submit there, or "
            "start it with --dashboard-host"
        ) from error


def wait(dashboard: str, job: str, tell: Callable[[str], object]) -> tuple[bool, str]:
    """Wait until a job has ended, and return whether it succeeded and what it has printed. ``tell`` gets its states.

    Raises:
        BrokenError: there were only errors at the URL for a minute. The job may go on.
    """
    client, state, answered = _client(dashboard), "", time.monotonic()
    while True:
        time.sleep(LOOK_EVERY_S)
        try:
            now = str(client.get_job_status(job).value)
            ended = now in ("SUCCEEDED", "FAILED", "STOPPED")
            printed = str(client.get_job_logs(job)) if ended else ""
        except (OSError, RuntimeError) as error:
            if time.monotonic() > answered + SILENT_S:
                raise BrokenError(
                    f"{dashboard} does not answer ({error}); the job may go on; ray job status {job} shows it"
                ) from error
            continue
        answered = time.monotonic()
        if now != state:
            state = now
            tell(state.lower())
        if ended:
            return state == "SUCCEEDED", printed


def _client(dashboard: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(dashboard)


if __name__ == "__main__":
    main()
