"""What ``symbiosis serve --metrics`` offers over HTTP: ``/metrics`` for Prometheus, ``/health`` and ``/ready``.

The server has threads of its own. For each scrape, such a thread asks the event loop for the executor's counts, so
nothing is counted twice and an executor that is not scraped pays nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from symbiosis.cli.options import host_and_port
from symbiosis.errors import UsageError

if TYPE_CHECKING:
    from symbiosis import Executor

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_REQUESTS = 16
"""Requests under way at a time; further connections are closed at once, so that they take no file descriptors and
threads of the executor."""
REQUEST_WITHIN_S = 10.0
"""Seconds that a request may take."""
ANSWER_S = 5.0
"""Seconds within which the event loop has to answer."""
MAX_TENANTS = 100
"""Number of tenants without keys, in the order in which scrapes have seen them, that have labels of their own."""
OTHER = "other"
"""Label of all further tenants together."""
_GAUGES = {
    "outstanding": ("outstanding_requests", "Requests that are queued or running."),
    "connections": ("connections", "Connections whose owner is known."),
    "load": ("load", "Part of the last seconds that was spent on rows, from 0 to 1."),
    "uptime_s": ("uptime_seconds", "Seconds since the executor was started."),
    "held_bytes": ("held_bytes", "Bytes of max_bytes that connections and unpacked copies of weights hold."),
    "free_bytes": ("free_bytes", "Bytes of max_bytes that are free."),
    "served_bytes": ("base_bytes", "Bytes of the weights that are served once for all tenants."),
    "unpacked_bytes": ("unpacked_bytes", "Bytes of packed weights that are kept in the usual layout too."),
}
"""Name and meaning of a metric, by the field of the executor's status that it shows."""
_OF_TENANTS = {
    "tenant_requests": ("Requests of a tenant that were answered.", "tenant"),
    "tenant_rows": ("Rows of these requests.", "tenant"),
    "tenant_wait_seconds": ("Time that these requests were queued.", "tenant"),
    "tenant_batch_requests": ("Sum over these requests of the size of their batch.", "tenant"),
    "tenant_service": ("Service of a tenant as the policy counts it (fair: tokens by weights).", "tenant"),
    "tokens": ("Rows of forward passes through all layers.", "tenant", "kind"),
    "slo_tokens": ("Tokens by whether they met their latency target: kept or missed.", "tenant", "slo"),
}
"""Meaning and labels of a metric of each tenant, by its name."""


class ExecutorCollector(Collector):
    """Makes metrics of an executor's status and statistics when they are scraped.

    Args:
        read: returns both, and the names of tenants with keys. It is called on the thread of the scrape.
    """

    def __init__(self, read: Callable[[], tuple[Mapping[str, Any], Any, Container[str]]]) -> None:
        self._read = read
        self._tenants: set[str] = set()
        """Tenants without keys that have labels of their own."""

    def collect(self) -> Iterator[Metric]:
        status, counts, keyed = self._read()
        about = "name", "model", "policy"
        info = _family(GaugeMetricFamily, "executor_info", "The model's name and class, and the policy.", *about)
        info.add_metric([status[label] for label in about], 1)
        yield info
        for field, (name, meaning) in _GAUGES.items():
            yield _gauge(name, meaning, status[field])
        yield _gauge("clients", "Clients that are connected.", len(status["clients"]))
        yield _gauge("draining", "1 while the executor shuts down, otherwise 0.", status["draining"])
        yield _counter("requests", "Requests that were answered.", {(): counts.requests})
        yield _counter("batch_rows", "Rows of batches that have run.", {(): counts.rows})
        yield _counter("batch_requests", "Sum over batches of their requests.", {(): counts.members})
        yield _counter("batches", "Batches that have run, by the policy's reason.", _by(counts.reasons), "reason")
        yield _counter(
            "wait_seconds", "Time that requests were queued, by the reason of their batch.", _by(counts.waits), "reason"
        )
        yield _histogram("request_wait_seconds", "Time that a request was queued.", counts.wait_times, "kind")
        yield _histogram("batch_run_seconds", "Time that a batch ran.", {"": counts.run_times})
        yield _counter(
            "rejections", "Peers that were refused or cut, and calls that were refused.", _by(counts.rejections), "why"
        )
        unshared: dict[tuple[str, ...], float] = defaultdict(float)
        for tenant in counts.tenants.values():
            for beside, reasons in tenant.unshared.items():
                unshared[beside,] += sum(reasons.values())
        meaning = "Requests that had a batch to themselves, by what other clients did: alone, thinking, …"
        yield _counter("unshared_requests", meaning, unshared, "beside")
        yield from self._of_tenants(counts.tenants, keyed)

    def _of_tenants(self, tenants: Mapping[str, Any], keyed: Container[str]) -> Iterator[Metric]:
        for name in tenants:
            if len(self._tenants) < MAX_TENANTS and name not in keyed:
                self._tenants.add(name)
        sums: dict[str, dict[tuple[str, ...], float]] = {name: defaultdict(float) for name in _OF_TENANTS}
        for name, counts in tenants.items():
            tenant = name if name in self._tenants or name in keyed else OTHER
            sums["tenant_requests"][tenant,] += counts.requests
            sums["tenant_rows"][tenant,] += counts.rows
            sums["tenant_wait_seconds"][tenant,] += counts.wait_s
            sums["tenant_batch_requests"][tenant,] += counts.mean_batch * counts.requests
            if counts.service:
                sums["tenant_service"][tenant,] += counts.service
            for kind, tokens in counts.tokens.items():
                sums["tokens"][tenant, kind] += tokens
            if counts.slo_kept or counts.slo_missed:
                sums["slo_tokens"][tenant, "kept"] += counts.slo_kept
                sums["slo_tokens"][tenant, "missed"] += counts.slo_missed
        for name, (meaning, *labels) in _OF_TENANTS.items():
            yield _counter(name, meaning, sums[name], *labels)


def _family(kind: Callable[..., T], name: str, meaning: str, *labels: str) -> T:
    return kind(f"symbiosis_{name}", meaning, labels=labels)


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"symbiosis_{name}", meaning, value)


def _counter(name: str, meaning: str, values: Mapping[tuple[str, ...], float], *labels: str) -> CounterMetricFamily:
    family = _family(CounterMetricFamily, name, meaning, *labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, meaning: str, values: Mapping[str, Any], *labels: str) -> HistogramMetricFamily:
    family = _family(HistogramMetricFamily, name, meaning, *labels)
    for label, (bounds, counts, seconds) in values.items():
        buckets = list(zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True))
        family.add_metric([label] if labels else [], buckets, seconds)
    return family


def _by(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): value for name, value in values.items()}


class MetricsServer:
    """The HTTP server. It opens its port at once, and shows an executor from :meth:`serve` on.

    Args:
        address: where to listen, as ``host:port``.

    Raises:
        UsageError: the address is malformed, or the port is not available.
    """

    def __init__(self, address: str) -> None:
        host, port = host_and_port(address, f"--metrics {address!r}: write HOST:PORT, such as 127.0.0.1:9100")
        self._executor: Executor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        registry = CollectorRegistry()
        registry.register(ExecutorCollector(lambda: self._ask(self._counts)))
        ProcessCollector(registry=registry)
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(host, port, self._answer, _server_class(host), _Quiet)
        except OSError as error:
            raise UsageError(f"--metrics {address}: cannot listen there: {error.strerror or error}") from error
        threading.Thread(target=self._server.serve_forever, name="symbiosis-metrics", daemon=True).start()

    def serve(self, executor: Executor) -> None:
        """Show an executor. Called on its event loop."""
        self._loop, self._executor = asyncio.get_running_loop(), executor

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()

    def _counts(self) -> tuple[Mapping[str, Any], Any, Container[str]]:
        assert self._executor is not None
        return self._executor.status(), self._executor.statistics(), self._executor.service.keyed_tenants

    def _ask(self, what: Callable[[], T]) -> T:
        """Return what a function returns that runs on the event loop.

        Raises:
            TimeoutError: the event loop has not answered within ANSWER_S.
            RuntimeError: the event loop is closed.
        """

        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(what())
            except Exception as error:  # noqa: BLE001 (it is raised on the thread that asks)
                answer.set_exception(error)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(call)
        return answer.result(ANSWER_S)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        status, text = "200 OK", "ok"
        if self._executor is None:
            if path != "/health":  # the process is alive, and loads the model
                status, text = "503 Service Unavailable", "the model is being loaded"
        else:
            try:
                if path == "/metrics":
                    return self._metrics(environ, start)  # type: ignore[no-any-return]
                if self._ask(self._executor.status)["draining"] and path == "/ready":
                    status, text = "503 Service Unavailable", "the executor is shutting down"
            except (TimeoutError, RuntimeError):
                status, text = "503 Service Unavailable", f"the event loop did not answer within {ANSWER_S:g} s"
        if path not in ("/metrics", "/health", "/ready"):
            status, text = "404 Not Found", "/metrics, /health and /ready are here"
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]


class _Quiet(WSGIRequestHandler):
    """Logs no requests, and gives up a client that is slow."""

    def setup(self) -> None:
        super().setup()
        self._end = threading.Timer(REQUEST_WITHIN_S, self._give_up)
        self._end.daemon = True
        self._end.start()

    def finish(self) -> None:
        self._end.cancel()
        super().finish()

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        pass


def _server_class(host: str) -> type[ThreadingWSGIServer]:
    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._free = threading.BoundedSemaphore(MAX_REQUESTS)
            super().__init__(*arguments, **options)

        def process_request(self, request: Any, client_address: Any) -> None:
            if not self._free.acquire(blocking=False):
                self.shutdown_request(request)
                return
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread can be started
                self._free.release()
                raise

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self._free.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            log.debug("a request of %s was not answered", client_address, exc_info=sys.exception())  # too slow, or gone

    return Server
