"""The actor that knows the addresses of all executors, and tells them to tenants over HTTP.

``GET /MODEL`` answers with an address on each line, with 404 for the name of no model, and with 503 while none serves.
Nothing else can be asked there, and nothing can be changed. The actor keeps no state that it cannot lose: executors
report twice a second.
"""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from symbiosis.cluster.plan import ClusterPlan, addresses

FRESH_S = 10.0
"""Seconds after the last report of an executor for which its address is given to tenants."""
BIND_S = 15.0
"""Seconds for the port of a former actor to become free."""


class DirectoryActor:
    """The plan of a cluster, and what its executors have reported."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._reports: dict[str, dict[str, Any]] = {}
        self._ended: set[str] = set()
        self._server = _server(plan.host, plan.port, {model.name for model in plan.models}, self._list)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()

    def plan(self) -> ClusterPlan:
        return self._plan

    def report(self, name: str, report: dict[str, Any]) -> None:
        """Note the state of an executor, unless it is to end."""
        if name not in self._ended:
            self._reports[name] = {**report, "at": time.monotonic()}

    def forget(self, names: list[str]) -> None:
        """Leave out executors that are about to end, from now on."""
        self._ended |= set(names)
        for name in names:
            self._reports.pop(name, None)

    def expect(self, names: list[str]) -> None:
        """Note executors that are about to start. Executors that have ended may have had the same names."""
        self._ended -= set(names)

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the latest report of each executor, with the seconds since then as ``age_s``."""
        now = time.monotonic()
        return {name: {**report, "age_s": now - report["at"]} for name, report in self._reports.items()}

    def _list(self, model: str) -> str:
        return "".join(f"{each}\n" for each in addresses(dict(self._reports), model, time.monotonic(), FRESH_S))


def _server(host: str, port: int, models: set[str], lines: Any) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            model = self.path.strip("/")
            status, text = 200, lines(model)
            if model not in models:
                status, text = 404, f"no model has this name; there are {', '.join(sorted(models))}\n"
            elif not text:
                status, text = 503, "no executor of this model serves now\n"
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    until = time.monotonic() + BIND_S
    while True:
        try:
            return Server((host, port), Handler)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
