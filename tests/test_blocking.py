"""Channels for synchronous code, whatever carries them: what Ctrl-C in the middle of a call leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.transports import wire
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.shm_client import ShmBlockingChannel
from symbiosis.transports.tcp_client import TcpBlockingChannel
from tests.helpers import in_thread, until

CLASSES: dict[str, type[BlockingChannel]] = {"shm": ShmBlockingChannel, "tcp": TcpBlockingChannel}
MOMENTS = {
    "half of it is sent": "_exchange",
    "before it is answered": "_answer",
    "after it was answered": "_answer",
    "half a BEGIN is sent": "_tell",
}
"""And the method that is interrupted."""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("scheme", CLASSES)
async def test_the_next_call_is_answered(
    base: Any, tmp_path: Path, scheme: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rightly, and soon: with no answer of the interrupted one in its place, also where ``retry`` is 0."""
    address = f"shm://{tmp_path}/s.sock" if scheme == "shm" else "tcp://127.0.0.1:0"
    cls: Any = CLASSES[scheme]
    layer = base.model.layers[0].self_attn.q_proj

    def call(rows: int) -> Call:
        return Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.full((rows, 32), float(rows)),))

    async with symbiosis.Executor(base) as executor:
        address = (await executor.listen(address)).address
        transport = make_transport(address, retry=0.0)
        channel: Any = await in_thread(transport.connect_blocking, address, "client")
        real = getattr(cls, MOMENTS[moment])

        def interrupted(self: Any, *arguments: Any) -> Any:
            if moment == "after it was answered":
                real(self, *arguments)
            elif moment.startswith("half") and scheme == "shm":
                self._socket.sendall(wire.frame(wire.pack(wire.Type.PING))[:5])
            elif moment.startswith("half"):
                self._line._socket.send(wire.pack(wire.Type.PING), zmq.SNDMORE)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(cls, MOMENTS[moment], interrupted)
            if MOMENTS[moment] == "_tell":
                assert await in_thread(interrupts, channel.begin_pass)
            else:
                assert await in_thread(interrupts, channel.call, call(3))
        for rows in (2, 5):
            (result,) = await in_thread(channel.call, call(rows))
            torch.testing.assert_close(result, layer(call(rows).tensors[0]))
        channel.close()
        await until(lambda: not executor.status()["clients"])


def interrupts(fn: Any, *arguments: Any) -> bool:
    """On a thread, where the interrupt must not get out: asyncio would take it for its own."""
    try:
        fn(*arguments)
    except KeyboardInterrupt:
        return True
    return False
