"""An executor inside an asyncio service.

A small HTTP server on a loopback port generates text for tenants, each with its own adapter, while another tenant
fine-tunes in the background, all on one base model and one event loop::

    POST /generate  {"tenant": "alice", "tokens": [5, 6, 7], "max_new_tokens": 8}  →  {"tokens": […]}
    GET  /statistics                                                               →  {"mean_batch": …, …}

The executor lives as long as the service. Each tenant's client is opened once and kept. Requests of one tenant run one
after another, and requests of different tenants share batches. An invalid request is answered with status 400 before it
reaches a model, and other tenants do not notice. HTTP is implemented here so that the example has no dependencies.

Run ``python examples/embed_in_service.py``. It sends itself some requests, prints the answers, and ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
from contextlib import AsyncExitStack
from typing import Any

import torch
from peft import IA3Config, LoraConfig

import symbiosis
from symbiosis.errors import SymbiosisError
from symbiosis.testing import tiny_model

TENANTS = {
    "alice": LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False),
    "bob": IA3Config(task_type="CAUSAL_LM"),
    "carol": None,
}


class BadRequestError(Exception):
    """The request is not valid. The message is sent back."""


class Service:
    """Owns the executor and one client per tenant; ``async with`` starts and ends it."""

    def __init__(self, model: Any) -> None:
        self.executor = symbiosis.Executor(model, policy="opportunistic")
        self.clients: dict[str, symbiosis.Client] = {}
        self.losses: list[float] = []
        self.training = asyncio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Service:
        async with AsyncExitStack() as stack:  # closes what was opened if a later step fails
            await stack.enter_async_context(self.executor)
            for name, config in TENANTS.items():
                client = self.executor.client(config, name=name, seed=0)
                self.clients[name] = await stack.enter_async_context(client)
            trainer = asyncio.create_task(self._fine_tune())
            stack.push_async_callback(_end, trainer)
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            await stack.enter_async_context(self._server)
            gc.freeze()  # a full collection over the objects of torch and transformers would block the loop for 0.2 s
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    async def _fine_tune(self) -> None:
        """Train a tenant's adapter in the background until the service ends."""
        async with self.executor.client(LoraConfig(task_type="CAUSAL_LM"), name="trainer", seed=0) as client:
            optimizer = torch.optim.AdamW([p for p in client.model.parameters() if p.requires_grad], lr=1e-2)
            ids = torch.arange(3, 35).reshape(2, 16)
            while True:
                self.losses.append(await client.train_step({"input_ids": ids, "labels": ids}, optimizer))
                self.training.set()

    async def generate(self, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict):
            raise BadRequestError("the body is no JSON object")
        client = self.clients.get(str(request.get("tenant")))
        if client is None:
            raise BadRequestError(f"no tenant {request.get('tenant')!r}; tenants are {', '.join(self.clients)}")
        tokens, count = request.get("tokens"), request.get("max_new_tokens", 8)
        known = range(client.model.config.vocab_size)
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(token) is int and token in known for token in tokens)
        ):
            raise BadRequestError(f"tokens is {tokens!r}; give one or more numbers below {known.stop}")
        if type(count) is not int or not 1 <= count <= 32:
            raise BadRequestError(f"max_new_tokens is {count!r}; give a number from 1 to 32")
        ids = torch.tensor([tokens])
        out = await client.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
        )
        return {"tenant": client.name, "tokens": out[0, ids.shape[1] :].tolist()}

    async def statistics(self) -> dict[str, Any]:
        numbers = self.executor.statistics()
        return {
            "requests": numbers.requests,
            "mean_batch": round(numbers.mean_batch, 2),
            "training_steps": len(self.losses),
            "tenants": {name: round(client.mean_batch, 2) for name, client in sorted(numbers.clients.items())},
        }

    # A minimal HTTP server.

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            status, answer = await self._answer(reader)
            body = json.dumps(answer).encode()
            head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the peer has disconnected
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if (method, path) == ("GET", "/statistics"):
                return "200 OK", await self.statistics()
            if (method, path) == ("POST", "/generate"):
                return "200 OK", await self.generate(json.loads(body))
            return "404 Not Found", {"error": f"{method} {path} does not exist"}
        except (BadRequestError, ValueError, asyncio.LimitOverrunError) as error:  # or bytes that are no HTTP or JSON
            return "400 Bad Request", {"error": str(error)}
        except SymbiosisError as error:
            return "503 Service Unavailable", {"error": str(error)}


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def ask(port: int, method: str, path: str, content: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Send one HTTP request, and return the status and the decoded body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b"" if content is None else json.dumps(content).encode()
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def main() -> None:
    async with Service(tiny_model()) as service:
        print(f"serving {', '.join(TENANTS)} on 127.0.0.1:{service.port}; a trainer runs in the background")
        await service.training.wait()
        wishes = [
            {"tenant": tenant, "tokens": [5, 6, 7 + turn], "max_new_tokens": 12}
            for turn in range(3)
            for tenant in TENANTS
        ]
        for _, answer in await asyncio.gather(*(ask(service.port, "POST", "/generate", wish) for wish in wishes)):
            print(f"  {answer['tenant']}: {answer['tokens']}")
        for wish in ({"tenant": "mallory", "tokens": [5]}, {"tenant": "bob"}, {"tenant": ["alice"]}):
            status, answer = await ask(service.port, "POST", "/generate", wish)
            print(f"  {wish['tenant']}: {status}, {answer['error']}")
        _, answer = await ask(service.port, "GET", "/statistics")
        print(f"statistics: {json.dumps(answer)}")
        first, last = service.losses[0], service.losses[-1]
        print(f"meanwhile the trainer took {len(service.losses)} steps; loss {first:.3f} → {last:.3f}")
    print("the service has ended")


if __name__ == "__main__":
    asyncio.run(main())
