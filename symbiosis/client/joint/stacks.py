"""Stacks of LoRA adapters, so that one batched product serves the rows of several clients.

A stack holds the A matrices of up to :data:`SLOTS` clients for one layer and rank, and their B matrices. The clients'
own parameters become windows on the stack: an optimizer step takes effect at once, and nothing is copied for a walk.
Each window is a storage of its own, so that a client that saves or inspects its parameters sees its own numbers alone.
A window is given to another client once nothing refers to its memory.

Legend: S slots in use; i in_features; o out_features; r rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

log = logging.getLogger(__name__)

SLOTS = 8
"""Clients of one stack. More clients have several stacks."""
_ALIGNED = 64
"""Alignment of each matrix in bytes, the same as of torch's allocator: with another one the last bit of a result may
differ."""


class _Matrices:
    """Room for SLOTS matrices of one shape."""

    def __init__(self, like: torch.Tensor) -> None:
        self.shape = like.shape
        step = _ALIGNED // like.element_size()
        self._stride = -(-like.numel() // step) * step
        self._room = torch.zeros(SLOTS, self._stride, dtype=like.dtype, device=like.device)
        self._bytes = self._stride * like.element_size()
        self.all = self._room.as_strided((SLOTS, *like.shape), (self._stride, like.shape[1], 1))

    def matrix(self, slot: int) -> torch.Tensor:
        """Return one slot's matrix, with a storage of its own."""
        storage: Any = self._room.untyped_storage()[slot * self._bytes : (slot + 1) * self._bytes]
        matrix = torch.empty(0, dtype=self._room.dtype, device=self._room.device)
        return matrix.set_(storage, 0, self.shape, (self.shape[1], 1))


class Stack:
    """A and B of up to SLOTS clients, for one layer and rank."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self._a, self._b = _Matrices(a), _Matrices(b)
        self._free = list(range(SLOTS))
        self._left: dict[int, list[torch.Tensor]] = {}
        """Matrices of slots that were given back. Something of the former client's may still refer to their memory,
        such as a state dict or the graph of a loss."""

    def fits(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        mine = self._a.all
        return self.has_shapes(a, b) and mine.dtype is a.dtype and mine.device == a.device and self.has_free_slot()

    def has_free_slot(self) -> bool:
        for slot, matrices in list(self._left.items()):
            if not any(map(has_other_users, matrices)):
                del self._left[slot]
                self._free.append(slot)
        return bool(self._free)

    def is_empty(self) -> bool:
        """Return whether no client has a slot."""
        return len(self._free) + len(self._left) == SLOTS

    def has_shapes(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return self._a.shape == a.shape and self._b.shape == b.shape

    def take(self, a: torch.nn.Parameter, b: torch.nn.Parameter) -> Slot:
        """Move the parameters of a client into a free slot."""
        slot = min(self._free)
        self._free.remove(slot)
        moved = [self._a.matrix(slot), self._b.matrix(slot)]
        for parameter, matrix in zip((a, b), moved, strict=True):
            matrix.copy_(parameter.data)
            parameter.data = matrix
        return Slot(self, slot, a, b, moved)

    def give_back(self, slot: int, matrices: list[torch.Tensor]) -> None:
        """Have a slot free as soon as nothing but these matrices refers to its memory."""
        self._left[slot] = matrices

    def places(self, slot: int) -> list[int]:
        """Return where a slot's matrices lie. Those of a parameter move to other memory if a client shares it."""
        return [matrices.all[slot].data_ptr() for matrices in (self._a, self._b)]

    def transposed(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [S, i, r] and B [S, r, o] of the first slots."""
        return self._a.all[:used].transpose(1, 2), self._b.all[:used].transpose(1, 2)


class Slot(NamedTuple):
    """One client's place in a stack."""

    stack: Stack
    number: int
    a: torch.nn.Parameter
    b: torch.nn.Parameter
    matrices: list[torch.Tensor]
    """The memory of A and B in the stack."""

    def holds(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Return whether these are the parameters in this slot."""
        if a is not self.a or b is not self.b or not self.stack.has_shapes(a, b):
            return False
        return [a.data_ptr(), b.data_ptr()] == self.stack.places(self.number)

    def is_referred_to(self) -> bool:
        """Return whether other tensors than the parameters have their memory."""
        return any(
            has_other_users(matrix, 1 + (parameter.data_ptr() == matrix.data_ptr()))
            for parameter, matrix in zip((self.a, self.b), self.matrices, strict=True)
        )

    def give_back(self) -> None:
        """Give the client its parameters back, as tensors of its own."""
        for parameter, place in zip((self.a, self.b), self.stack.places(self.number), strict=True):
            if parameter.data_ptr() == place:
                parameter.data = parameter.data.clone()
        self.stack.give_back(self.number, self.matrices)


class Stacks:
    """The stacks of a joint model, by layer."""

    def __init__(self) -> None:
        self._stacks: dict[str, list[Stack]] = {}
        if _count is None:
            log.warning("this version of torch does not count users of memory, so LoRA products are not batched")

    def place(
        self, held: Iterable[Slot], adapters: Mapping[str, tuple[torch.nn.Parameter, torch.nn.Parameter]]
    ) -> tuple[dict[str, Slot], list[Slot]]:
        """Give a client's adapters slots.

        Args:
            held: the slots that the client has.
            adapters: A and B of its active adapters by layer.

        Returns:
            The slots by layer. Parameters whose memory has other users, or may have some in other processes, get none.
            And slots of other parameters, to which other tensors of the client refer: they stay, so that these tensors
            have the parameters' values still.
        """
        names = {id(a): name for name, (a, _) in adapters.items()}
        kept: dict[str, Slot] = {}
        parked: list[Slot] = []
        for slot in held:
            name = names.get(id(slot.a))
            if name is not None and slot.holds(*adapters[name]):
                kept[name] = slot
            elif slot.is_referred_to():
                parked.append(slot)
            else:
                slot.give_back()
        found = kept | {
            name: self._stack(name, a, b).take(a, b)
            for name, (a, b) in adapters.items()
            if name not in kept and not any(map(has_other_users, (a, b))) and not any(map(_is_shared, (a, b)))
        }
        return found, parked

    def free(self) -> None:
        """Forget the stacks in which no client has a slot."""
        for stacks in self._stacks.values():
            stacks[:] = [stack for stack in stacks if not stack.is_empty()]

    def _stack(self, name: str, a: torch.Tensor, b: torch.Tensor) -> Stack:
        stacks = self._stacks.setdefault(name, [])
        found = next((stack for stack in stacks if stack.fits(a, b)), None)
        if found is None:
            found = Stack(a.data, b.data)
            stacks.append(found)
        return found


class StackRows:
    """The rows of one walk whose adapters are in one stack.

    Args:
        stack: where their adapters are.
        members: rows, slot, and LoRA's factor of each client, in the order of rows.
        count: N.
    """

    def __init__(self, stack: Stack, members: Sequence[tuple[range, int, float]], count: int) -> None:
        rows, slots = [row for mine, _, _ in members for row in mine], [slot for _, slot, _ in members]
        used, most = max(slots) + 1, max(len(mine) for mine, _, _ in members)
        self._a, self._b = stack.transposed(used)
        device = self._a.device
        self._shape = used, most, -1
        self._first, self._count = rows[0], used * most
        self._in_order = slots == list(range(used)) and rows == list(range(rows[0], rows[0] + used * most))
        if not self._in_order:
            places = [slot * most + number for mine, slot, _ in members for number in range(len(mine))]
            row_at = dict(zip(places, rows, strict=True))
            self._row_at = torch.tensor([row_at.get(place, rows[0]) for place in range(used * most)], device=device)
            self._places = torch.tensor(places, device=device)
            self._rows = torch.tensor(rows, device=device)
        factors = [[factor] for mine, _, factor in members for _ in mine]
        self._scaling = torch.tensor(factors, dtype=self._a.dtype, device=device)
        self.is_whole = len(rows) == count

    @property
    def dtype(self) -> torch.dtype:
        return self._a.dtype

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the adapters add to their rows, [rows, o], given x [N, i] in their precision."""
        x = x[self._first : self._first + self._count] if self._in_order else x.index_select(0, self._row_at)
        z = torch.bmm(torch.bmm(x.view(self._shape), self._a), self._b).flatten(0, 1)
        return (z if self._in_order else z.index_select(0, self._places)).mul_(self._scaling)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Write the product to its rows of ``total`` [N, o], whose precision is at least that of the product."""
        product = self.product(x)
        if self._in_order:
            total[self._first : self._first + len(product)] = product
        else:
            total.index_copy_(0, self._rows, product.to(total.dtype))


def has_other_users(tensor: torch.Tensor, known: int = 1) -> bool:
    """Return whether tensors besides this one, or besides so many that are known, have its memory: an entry of a state
    dict, the flat buffer of an optimizer, or a matrix that autograd keeps."""
    return _users(tensor) > _USERS_OF_ONE + known - 1


def _is_shared(tensor: torch.Tensor) -> bool:
    """Return whether other processes may have a tensor's memory. Of a GPU's memory, torch says so always."""
    return tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _users(tensor: torch.Tensor) -> float:
    return math.inf if _count is None else float(_count(tensor.untyped_storage()._cdata))


_count = getattr(torch._C, "_storage_Use_Count", None)  # private to torch
_USERS_OF_ONE = min(_users(torch.empty(1, device="cpu")), 2**32)
"""What torch counts for memory that one tensor has."""


def parameters_of(layer: Any, name: str) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Return A and B of a LoRA layer of PEFT."""
    return layer.lora_A[name]._parameters["weight"], layer.lora_B[name]._parameters["weight"]
