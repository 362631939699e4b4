"""Coroutine clients of a base model that another process serves."""

from __future__ import annotations

import asyncio
import getpass
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from symbiosis.client.client import Client
from symbiosis.client.joint import check_mode, make_decoder
from symbiosis.core.privacy import Privacy, masked
from symbiosis.core.registry import make_privacy, make_transport
from symbiosis.core.terms import MOST_DECODED, NO_TERMS, Kind, Terms
from symbiosis.core.transport import Channel, Look
from symbiosis.errors import BusyError, ExecutorClosedError, ShareError, UsageError
from symbiosis.modes import modes_aside
from symbiosis.offline import without_hub

if TYPE_CHECKING:
    from peft import PeftConfig

    from symbiosis.client.joint.decoder import JointDecoder

_numbers = itertools.count(1)
_MAX_CLIENTS = 1024
"""Clients whose walks are counted."""


def new_name() -> str:
    """Return a client name that no other client is likely to have."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container; the latter from Python 3.13 on
        user = f"uid{os.getuid()}"
    return f"{user}-{os.getpid()}-{next(_numbers)}"


def connect(address: str, *, privacy: str | Privacy | None = None, joint: str = "auto", **options: Any) -> Base:
    """Return a base model served by another process, to be opened with ``async with``.

    Args:
        address: an executor's address, such as ``shm:///tmp/symbiosis.sock``.
        privacy: how the rows of its clients are masked by default; see :meth:`symbiosis.Executor.client`.
        joint: how its clients that decode are walked together; see :class:`symbiosis.Executor`. Clients with terms of
            their own, and clients whose rows are masked, walk alone.
        **options: of the transport. All transports between processes have ``retry``: seconds to wait for an executor
            that was lost, 60 by default.

    Raises:
        UnknownNameError: no transport or privacy scheme has this name.
        UsageError: the transport or the scheme has no such option.
    """
    return Base(address, privacy=privacy, joint=joint, **options)


class Base:
    """A base model at an address; see :func:`connect`."""

    def __init__(
        self, address: str, *, privacy: str | Privacy | None = None, joint: str = "auto", **options: Any
    ) -> None:
        self.address = address
        self._options = options
        self._privacy = make_privacy(privacy)
        self._transport = make_transport(address, **options)
        self._look: Look | None = None
        self._clients: list[Client] = []
        """Clients that are open, or are being opened, and some that were closed."""
        self._closing: asyncio.Future[None] | None = None
        self._walks: dict[str, Counter[str]] = {}
        check_mode(joint)
        self._joint_mode = joint
        self._joint = self._make_decoder()

    async def __aenter__(self) -> Base:
        if self._closing is not None and not self._closing.done():
            await asyncio.wait([self._closing])
        look = await asyncio.to_thread(self._transport.look, self.address)
        if look.gap is not None:
            raise look.gap
        self._look = look
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every client that is still open. This goes on if the caller is cancelled."""
        with modes_aside():  # the caller's torch modes are its own, also while it waits
            if self._closing is None or self._closing.done():
                self._closing = asyncio.ensure_future(self._close())
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._look = None
        while self._clients:
            await self._clients.pop().close()
        joint, self._joint = self._joint, self._make_decoder()  # the base may be opened again
        if joint is not None:
            await joint.close(ExecutorClosedError.of(self.address))

    def client(
        self,
        peft_config: PeftConfig | None = None,
        *,
        name: str | None = None,
        seed: int | None = None,
        device: str | torch.device | None = None,
        priority: int = 0,
        slo_ms: float | None = None,
        ttft_ms: float | None = None,
        kind: Kind | None = None,
        privacy: str | Privacy | None = None,
    ) -> Client:
        """Return a client of this model, to be opened with ``async with``.

        Args:
            peft_config, name, seed: see :meth:`symbiosis.Executor.client`. Open clients of a base have different names.
            device: where the client's part of the model runs; by default where the transport delivers tensors.
            priority, slo_ms, ttft_ms, kind: what the client asks for; see :meth:`symbiosis.Executor.client`. A client
                in another process can make itself less urgent than the default, never more urgent.
            privacy: how its rows are masked; by default as :func:`connect` was told. ``"none"`` does not mask them.

        Raises:
            UsageError: a term or the privacy scheme is invalid.
        """
        terms = Terms(priority, slo_ms, ttft_ms, kind).check()
        scheme = self._privacy if privacy is None else make_privacy(privacy)

        async def connect(name: str) -> Channel:
            if self._look is None:
                raise self._not_open()
            # Each of several replicas would admit the name, until one of the clients has to join the other's replica.
            if any(other.is_open and other.name == name for other in self._clients if other is not client):
                raise BusyError(f"a client named {name!r} is open already; close it, or choose another name")
            self._clients = [*(each for each in self._clients if not each.closed), client]
            try:
                channel = await self._transport.connect(self.address, name, terms)
                return await masked(scheme, channel, self.address, terms, self._options)
            except BaseException:
                self._clients = [each for each in self._clients if each is not client]
                raise

        client = Client(
            connect,
            peft_config,
            name=name or new_name(),
            seed=seed,
            device=device,
            masked=scheme is not None,
            joint=lambda: self._joint,
            apart="a privacy scheme" if scheme is not None else "terms of its own" if terms != NO_TERMS else "",
        )
        return client

    def _make_decoder(self) -> JointDecoder | None:
        # A larger decode request of another process counts as a prompt.
        return make_decoder(self._joint_mode, self._connect_joint, lambda _: True, self._walked, most_rows=MOST_DECODED)

    async def _connect_joint(self) -> Channel:
        return await self._transport.connect(self.address, f"{new_name()}-joint")

    def _walked(self, client: str, alone: str | None) -> None:
        if client not in self._walks and len(self._walks) >= _MAX_CLIENTS:
            del self._walks[next(iter(self._walks))]
        self._walks.setdefault(client, Counter())[alone or "joint"] += 1

    def walks(self) -> dict[str, dict[str, int]]:
        """Return by client the number of tokens that were decoded ``"joint"``, or alone, by the reason. Of more than
        1,024 clients, the first ones are forgotten."""
        return {client: dict(counts) for client, counts in self._walks.items()}

    async def status(self) -> dict[str, Any]:
        """Return what the executor is and does, as plain data."""
        return (await asyncio.to_thread(self._transport.look, self.address)).status

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration."""
        return dict(self._shown().model["config"])

    def tokenizer(self) -> Any:
        """Return the model's tokenizer, from the executor.

        Raises:
            UsageError: the executor has no tokenizer.
        """
        return tokenizer_of(self._shown().tokenizer, self.address)

    def _shown(self) -> Look:
        if self._look is None:
            raise self._not_open()
        return self._look

    def _not_open(self) -> ExecutorClosedError:
        return ExecutorClosedError(f"{self.address} is not open; use `async with symbiosis.connect(...) as base:`")


TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab", ".bpe")
"""Names' ends of the files that a client takes for a tokenizer's: data, no code and no pickle."""


def tokenizer_of(files: Mapping[str, bytes], address: str) -> Any:
    """Return a tokenizer, given its files' names and contents. Nothing in them is executed.

    Raises:
        UsageError: there are no files.
        ShareError: transformers cannot read them or would have to execute code among them, or one is no tokenizer's.
    """
    from transformers import AutoTokenizer

    if not files:
        raise UsageError(f"the executor at {address} has no tokenizer to share; load one yourself")
    with tempfile.TemporaryDirectory() as folder:
        for name in files:
            # transformers would build the configuration that config.json describes, of any size.
            if Path(name).suffix not in TOKENIZER_SUFFIXES or name.casefold() == "config.json":
                raise ShareError(f"the executor at {address} sends {name!r}, which is no file of a tokenizer")
        try:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            with without_hub():
                return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise errors of all kinds for malformed files
            raise ShareError(f"the tokenizer of the executor at {address} cannot be read: {error}") from error
