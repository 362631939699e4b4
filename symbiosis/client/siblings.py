"""Siblings: layers that read the same rows, so that one request serves them all.

A model feeds the very same tensor to its q, k and v projections, and to gate and up. Layers that were fed one tensor,
one after another, form a group from then on. The member that is called first sends the request of the whole group; the
others find their results here. If that keeps failing, because the model skips a member or feeds it another tensor, the
group is dissolved. Siblings belong to one block, which one executor serves, where a model is divided between several.

Legend: n rows; o out_features.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from symbiosis.core.requests import MAX_SIBLINGS, Key, LayerSpec, Pass
from symbiosis.core.share import block_of

_MISSES = 3
"""A group is dissolved after so many :attr:`Siblings.misses`."""
_grouping = threading.RLock()  # reentrant: the garbage collector may end an abandoned walk inside


class Member(Protocol):
    """A layer that may have siblings."""

    spec: LayerSpec
    siblings: Siblings | None
    may_have_siblings: bool

    def is_in_model_of(self, other: Member) -> bool:
        """Return whether both layers belong to the same copy of a model."""

    def request(self, key: Key, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send the rows of x, and return a result [n, o] for each layer of the key."""

    def join(self, group: Siblings) -> None:
        """Become a member of a group."""

    def leave_for_good(self) -> None:
        """Leave the group, and join none from now on."""


class Siblings:
    """A group of layers that read the same rows."""

    dissolved = False
    misses = 0
    """Number of consecutive requests that were followed by another one before all of their results were collected."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = sorted(members, key=lambda member: member.spec.layer)
        self._keys = {
            pass_: Key(tuple(member.spec.layer for member in self.members), pass_)
            for pass_ in (Pass.FORWARD, Pass.FORWARD_WITHOUT_BIAS)
        }

    def key(self, pass_: Pass) -> Key:
        """Return the key of a request for all members."""
        return self._keys[pass_]

    def dissolve(self) -> None:
        """End the group: its members ask for themselves from now on."""
        with _grouping:
            self.dissolved = True
            for member in self.members:
                member.leave_for_good()


def _group(run: Sequence[Member]) -> None:
    """Make a group of layers that were fed the same tensor."""
    with _grouping:
        # Another thread may have formed the group meanwhile.
        if len(run) > 1 and all(member.siblings is None and member.may_have_siblings for member in run):
            group = Siblings(run)
            for member in run:
                member.join(group)


class _Fetched:
    """Results of one request of a group that its members have not collected yet."""

    __slots__ = ("pass_", "results", "version", "x")

    def __init__(self, x: torch.Tensor, pass_: Pass, results: dict[Member, torch.Tensor]) -> None:
        self.x = x
        self.version = x._version
        self.pass_ = pass_
        self.results = results


class SiblingState:
    """What one thread knows: which layers were fed the last tensor, and results that wait for their layers.

    Threads that share a model each walk it with rows of their own, so each has its own state.
    """

    __slots__ = ("_last_input", "_pass", "_run", "fetched")

    def __init__(self) -> None:
        self._last_input: weakref.ref[torch.Tensor] | None = None
        self._pass = Pass.FORWARD
        self._run: list[Member] = []
        """Layers that were fed the last input so far."""
        self.fetched: dict[Siblings, _Fetched] = {}

    def watch(self, layer: Member, x: torch.Tensor, pass_: Pass) -> None:
        """Note that a layer without siblings is fed x."""
        if self.fetched:  # of groups that another thread has dissolved
            self.fetched = {group: found for group, found in self.fetched.items() if not group.dissolved}
        last = self._last_input
        if last is not None and last() is x and self._pass is pass_:
            if layer in self._run:
                return
            if len(self._run) < MAX_SIBLINGS and all(_may_be_siblings(layer, other) for other in self._run):
                self._run.append(layer)
                return
        _group(self._run)
        self._run = [layer]
        self._pass = pass_
        self._last_input = weakref.ref(x)

    def forget(self) -> None:
        """Drop what a walk that has ended, or failed, left behind."""
        _group(self._run)
        self._last_input = None
        self._run = []
        self.fetched.clear()

    def result(self, layer: Member, group: Siblings, x: torch.Tensor, pass_: Pass) -> torch.Tensor | None:
        """Return the layer's result [n, o] for x, or None if the group has just been dissolved."""
        fetched = self.fetched.get(group)
        if fetched is not None:
            if fetched.x is x and x._version == fetched.version and pass_ is fetched.pass_:
                result = fetched.results.pop(layer, None)
                if result is not None:
                    if not fetched.results:
                        del self.fetched[group]
                        group.misses = 0
                    return result
            del self.fetched[group]
            group.misses += 1
            if group.misses >= _MISSES:
                group.dissolve()
                return None
        results = dict(zip(group.members, layer.request(group.key(pass_), x), strict=True))
        result = results.pop(layer)
        if self._last_input is not None and self._last_input() is x:  # another thread has formed the group since then
            for member in self._run:  # they have asked for themselves
                results.pop(member, None)
        if results:
            self.fetched[group] = _Fetched(x, pass_, results)
        return result


def _may_be_siblings(one: Member, other: Member) -> bool:
    if one.spec.layer == other.spec.layer or block_of(one.spec.name) != block_of(other.spec.name):
        return False
    return one.is_in_model_of(other)
