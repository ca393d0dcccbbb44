"""Writes log lines as JSON, one object per line, for programs that collect logs.

A line has ``time``, ``level``, ``logger`` and ``message`` and, if known, ``stage``, ``table``, ``lsn`` and numbers.
These fields are the ``extra`` of the :mod:`logging` call, or are set for all lines of a block (:func:`about`). Only our
own loggers write JSON. Output of Java and of libraries stays text, in ``run.log``.

No line contains row values or secrets: our messages have neither, and only an exception's class is written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Any, Final

VARIABLE: Final = "PGCDC_LOG_FORMAT"
"""The variable of the setting ``log_format``."""
TEXT, JSON = "text", "json"
_DESCRIPTOR: Final = "PGCDC_ASSETS_LOG_FD"
"""The variable with the file descriptor to which a child process writes its lines."""
_LOGGER: Final = logging.getLogger("pgcdc_assets")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_about: ContextVar[Mapping[str, Any]] = ContextVar("about", default={})  # noqa: B039  (never changed)


class JsonFormatter(logging.Formatter):
    """Formats lines as JSON. ``fields``: fields of every line; a line's own field of that name takes precedence."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **_about.get(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info and record.exc_info[0]:
            line["error"] = record.exc_info[0].__name__
        return json.dumps(line, default=str, ensure_ascii=False)


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Add these fields to all lines that this thread writes during the block."""
    before = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(before)


def in_words(message: str, fields: Mapping[str, Any]) -> str:
    """The message for people, followed by the fields whose values it does not contain."""
    return " ".join([message, *(f"{name}={value}" for name, value in fields.items() if str(value) not in message)])


def begin(*, as_json: bool, **fields: Any) -> None:
    """Write the lines of our loggers as JSON to the present stderr, even if a run later redirects stderr to
    ``run.log``. With ``as_json`` false, restore Python's default logging. May be called again."""
    _end()
    if as_json:
        _write(os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8"), **fields)


def begin_in_child(**fields: Any) -> None:
    """In a child process: write lines as JSON to the parent's stream, if the parent writes JSON."""
    if _DESCRIPTOR in os.environ:
        _write(os.fdopen(int(os.environ[_DESCRIPTOR]), "w", buffering=1, encoding="utf-8"), **fields)


def for_child() -> tuple[dict[str, str], tuple[int, ...]]:
    """Variables and descriptors that a child process needs for :func:`begin_in_child`."""
    if (stream := _stream()) is None:
        return {}, ()
    return {_DESCRIPTOR: str(stream.fileno())}, (stream.fileno(),)


def as_json() -> bool:
    """Whether this process writes JSON lines."""
    return _stream() is not None


def _write(stream: IO[str], **fields: Any) -> None:
    handler = _JsonHandler(stream)
    handler.setFormatter(JsonFormatter(**fields))
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False


class _JsonHandler(logging.StreamHandler[IO[str]]):
    """The handler that this module installs."""


def _handlers() -> list[_JsonHandler]:
    return [handler for handler in _LOGGER.handlers if isinstance(handler, _JsonHandler)]


def _stream() -> IO[str] | None:
    return next((handler.stream for handler in _handlers()), None)


def _end() -> None:
    for handler in _handlers():
        _LOGGER.removeHandler(handler)
        handler.stream.close()
        _LOGGER.setLevel(logging.NOTSET)
        _LOGGER.propagate = True
