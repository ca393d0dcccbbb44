"""What an application is made of: its data model, its traffic, its nightly job, its migrations, and what it keeps true.

The SQL is written as the frameworks emit it; the applications themselves are inventions of this project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import psycopg

Request = Callable[["Session"], None]
"""What one visitor causes: a transaction as a whole; savepoints inside it are the request's own."""


class RolledBack(Exception):
    """A request that the application gives up after it has written: a validation failed, a service was not there."""


@dataclass
class Session:
    """One connection of the application, its own random numbers, and the longest statement that it waited for."""

    conn: psycopg.Connection[Any]
    random: Random
    longest: tuple[float, str] = (0.0, "")
    done: dict[str, int] = field(default_factory=dict)

    def execute(self, statement: str, *values: Any) -> psycopg.Cursor[Any]:
        return self.conn.execute(statement.encode(), values or None)

    def row(self, statement: str, *values: Any) -> tuple[Any, ...]:
        """The first row; a request that finds nothing to work on ends here."""
        row: tuple[Any, ...] | None = self.execute(statement, *values).fetchone()
        if row is None:
            raise RolledBack
        return row

    def value(self, statement: str, *values: Any) -> Any:
        return self.row(statement, *values)[0]

    def pick(self, table: str, key: str = "id", where: str = "true") -> Any:
        """Some row's key. ``where`` keeps to the rows that the request may use."""
        found = self.execute(f"SELECT {key} FROM {table} WHERE {where} ORDER BY {key} LIMIT 500").fetchall()
        if not found:
            raise RolledBack
        return self.random.choice(found)[0]

    def text(self, length: int) -> str:
        """Words that hardly compress, with what people type."""
        words = ("naïve", "日本語", "🐘", "tab\there", "O'Hara", 'say "so"', "back\\slash", "{a,b}", "NULL", "", "\n")
        made = [self.random.choice(words), f"{self.random.getrandbits(64):x}"]
        while sum(map(len, made)) < length:
            made.append(f"{self.random.getrandbits(256):x}")
        return " ".join(made)[: max(length, 1)]


@dataclass(frozen=True)
class Migration:
    """``steps`` are sent one by one, and each is a transaction; traffic goes on between them."""

    name: str
    steps: tuple[str, ...]
    setup: bool = False
    """Makes tables, so that whoever deploys it runs `pgcdc setup` afterwards."""


@dataclass(frozen=True)
class Invariant:
    """A query that finds what may not be, over tables named by ``tables`` (alias to schema.table).

    Every transaction of the application keeps it, so each consistent point of the lake does.
    """

    name: str
    tables: Mapping[str, str]
    wrong: str


@dataclass(frozen=True)
class Application:
    name: str
    model: str
    """The schema, as SQL."""
    requests: Mapping[Request, int]
    """What visitors do, and how often in relation to each other."""
    rejected: Request
    """The one of them that always ends in a rollback."""
    nightly: Request
    migrations: tuple[Migration, ...]
    invariants: tuple[Invariant, ...]
