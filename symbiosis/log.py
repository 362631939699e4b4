"""Events for operators: who joined, left, was refused, died. Through the standard ``logging``, so that whoever embeds
the package decides where they go; ``symbiosis serve`` renders them on the console or as JSON.

Never in an event: tensors, keys, texts of a tenant.
"""

from __future__ import annotations

import logging
from typing import cast

import structlog

__all__ = ["get_logger", "render"]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose keyword arguments become fields of the log record: ``log.info("joined", client="alice")``."""
    return cast(
        structlog.stdlib.BoundLogger,
        structlog.wrap_logger(
            logging.getLogger(name),
            processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
            wrapper_class=structlog.stdlib.BoundLogger,
            cache_logger_on_first_use=True,
        ),
    )


def render(json: bool, level: int = logging.INFO) -> None:
    """Show the package's events on standard error, for people or, a JSON object a line, for machines."""
    shared: list[structlog.types.Processor] = [
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: structlog.types.Processor = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=None or False)
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                final,
            ],
        )
    )
    logger = logging.getLogger("symbiosis")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
