"""The parts of an application: data model, traffic, nightly job, migrations, and invariants. The SQL has the form that
the frameworks send. The applications are inventions of this project."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import psycopg

Request = Callable[["Session"], None]
"""What one visitor causes: one transaction. The request itself makes savepoints inside it."""


class RolledBack(Exception):
    """The application gives up a request after it has written, because a validation or a service failed."""


@dataclass
class Session:
    """One connection of the application, with its own random numbers and its slowest request."""

    conn: psycopg.Connection[Any]
    random: Random
    longest: tuple[float, str] = (0.0, "")
    done: dict[str, int] = field(default_factory=dict)

    def execute(self, statement: str, *values: Any) -> psycopg.Cursor[Any]:
        return self.conn.execute(statement.encode(), values or None)

    def row(self, statement: str, *values: Any) -> tuple[Any, ...]:
        """The first row. Without a row, the request ends here."""
        row: tuple[Any, ...] | None = self.execute(statement, *values).fetchone()
        if row is None:
            raise RolledBack
        return row

    def value(self, statement: str, *values: Any) -> Any:
        return self.row(statement, *values)[0]

    def pick(self, table: str, key: str = "id", where: str = "true") -> Any:
        """The key of a random row. ``where`` selects the rows that the request may use."""
        found = self.execute(f"SELECT {key} FROM {table} WHERE {where} ORDER BY {key} LIMIT 500").fetchall()
        if not found:
            raise RolledBack
        return self.random.choice(found)[0]

    def text(self, length: int) -> str:
        """Text that hardly compresses, with odd characters."""
        words = ("naïve", "日本語", "🐘", "tab\there", "O'Hara", 'say "so"', "back\\slash", "{a,b}", "NULL", "", "\n")
        made = [self.random.choice(words), f"{self.random.getrandbits(64):x}"]
        while sum(map(len, made)) < length:
            made.append(f"{self.random.getrandbits(256):x}")
        return " ".join(made)[: max(length, 1)]


@dataclass(frozen=True)
class Migration:
    """Each step is sent as its own transaction. Traffic goes on between the steps."""

    name: str
    steps: tuple[str, ...]
    setup: bool = False
    """Whether it creates tables, so that the operator runs `pgcdc setup` afterwards."""


@dataclass(frozen=True)
class Invariant:
    """A query for rows that must not exist, over ``tables`` (alias to schema.table). Every transaction of the
    application keeps the invariant, so each consistent point must keep it as well."""

    name: str
    tables: Mapping[str, str]
    wrong: str


@dataclass(frozen=True)
class Application:
    name: str
    model: str
    """The schema, as SQL."""
    requests: Mapping[Request, int]
    """The requests and their relative frequency."""
    rejected: Request
    nightly: Request
    migrations: tuple[Migration, ...]
    invariants: tuple[Invariant, ...]
