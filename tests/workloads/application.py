"""The parts of a sample application: data model, traffic, nightly job, migrations, and invariants. The SQL has the form
that real frameworks send. The applications were invented for these tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import psycopg

Request = Callable[["Session"], None]
"""A request of one visitor: a function that writes in one transaction, which it may divide by savepoints."""


class RolledBack(Exception):
    """Raised by a request that has already written, because a validation or a service failed. The transaction is rolled
    back."""


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
        """The first row of the result. If there is no row, the request ends."""
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
        """Text of this length that hardly compresses, with unusual characters."""
        words = ("naïve", "日本語", "🐘", "tab\there", "O'Hara", 'say "so"', "back\\slash", "{a,b}", "NULL", "", "\n")
        made = [self.random.choice(words), f"{self.random.getrandbits(64):x}"]
        while sum(map(len, made)) < length:
            made.append(f"{self.random.getrandbits(256):x}")
        return " ".join(made)[: max(length, 1)]


@dataclass(frozen=True)
class Migration:
    """A schema migration. Each step is a separate transaction. The traffic continues between the steps."""

    name: str
    steps: tuple[str, ...]
    setup: bool = False
    """Whether it creates tables, so that the operator runs `pgcdc setup` afterwards."""


@dataclass(frozen=True)
class Invariant:
    """An invariant of the application. ``wrong``: a query for rows that must not exist, over ``tables`` (alias to
    schema.table). Every transaction of the application keeps the invariant, so it must hold at each consistent
    point."""

    name: str
    tables: Mapping[str, str]
    wrong: str


@dataclass(frozen=True)
class Application:
    name: str
    model: str
    """The SQL that creates the database schema."""
    requests: Mapping[Request, int]
    """The requests and their relative frequency."""
    rejected: Request
    nightly: Request
    migrations: tuple[Migration, ...]
    invariants: tuple[Invariant, ...]
