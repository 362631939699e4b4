"""Events for operators: clients that join, leave or are refused, and executors that are lost.

Events go through the standard ``logging``, so the embedding program decides where they are written. ``symbiosis serve``
writes them to the console or as JSON. Events never contain tensors, keys or texts of a tenant.
"""

from __future__ import annotations

import logging
from typing import cast

import structlog


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger whose keyword arguments become fields of the record: ``log.info("joined", client="alice")``."""
    return cast(
        structlog.stdlib.BoundLogger,
        structlog.wrap_logger(
            logging.getLogger(name),
            processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
            wrapper_class=structlog.stdlib.BoundLogger,
            cache_logger_on_first_use=True,
        ),
    )


def render(json: bool) -> None:
    """Write the package's events to standard error: as text, or as one JSON object per line."""
    shared: list[structlog.types.Processor] = [
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: structlog.types.Processor = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=False)
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
    logger.setLevel(logging.INFO)
    logger.propagate = False
