"""Errors of calls: how they reach clients without the rows of other tenants."""

from __future__ import annotations

from symbiosis.core.requests import Call


def fail(call: Call, error: BaseException) -> None:
    """End a call with an error, unless it has ended."""
    if call.reply is not None and not call.reply.done():
        call.reply.set_exception(error)


def strip_tracebacks(error: BaseException) -> None:
    """Take the tracebacks off an error and off all that led to it. Their frames hold the rows of every tenant."""
    found: dict[int, BaseException] = {}
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
