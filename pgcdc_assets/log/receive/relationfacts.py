"""Reads the catalog's facts about the relations for which the stream sends Relation messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psycopg

from pgcdc_assets.errors import CopyBlocked
from pgcdc_assets.protocol.messages import Relation
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.source.catalog.tables import relation_facts
from pgcdc_assets.source.connect.silence import TELL_SECONDS
from pgcdc_assets.source.slot.blockers import lockers, log_blockers

RelationKey = tuple[int, frozenset[int]]
"""A relation's OID and the type OIDs of its columns. A relation has a second key in the stream if the type of a column
was changed."""
Described = dict[RelationKey, RelationFacts]
Describe = Callable[[Sequence[Relation]], Described]
"""A function that reads the catalog's facts about many relations at once."""


class WaitEnded(Exception):
    """Raised to stop the receiver while it waits for the catalog. The next connection receives the same relations
    again, and reads their facts."""


class CatalogFacts:
    """Reads the facts of ``at_once`` relations per query, and calls ``between`` after each query. ``between`` sends
    status updates, because a transaction may touch thousands of tables, which need many queries."""

    def __init__(
        self, conn: psycopg.Connection[Any], publications: Sequence[str], at_once: int, between: Callable[[], None],
        rest: Callable[[], None],
    ) -> None:  # fmt: skip
        """``rest``: called before a query is repeated. A query is repeated while another session holds, or waits for, a
        lock on a table with a row filter. ``rest`` may raise :class:`WaitEnded`."""
        self._conn = conn
        self._publications = publications
        self._at_once = at_once
        self._between = between
        self._rest = rest

    def __call__(self, relations: Sequence[Relation]) -> Described:
        asked = sorted({described(relation) for relation in relations}, key=lambda one: one[0])
        found: Described = {}
        while asked:
            # A query can ask for an OID only once. So a relation that has two keys is in two queries.
            together = dict(asked[: self._at_once])
            answers = self._answers(together)
            found |= {(oid, types): answers[oid] for oid, types in together.items()}
            asked = [one for one in asked if one not in found]
            self._between()
        return found

    def _answers(self, together: Mapping[int, Iterable[int]]) -> dict[int, RelationFacts]:
        """Repeats the query until no lock blocks it. Between two attempts this session does not wait for the lock,
        because its place in the lock queue would block other sessions that want the table."""
        logged_at = time.monotonic()
        while True:
            with suppress(CopyBlocked):
                return relation_facts(self._conn, together, self._publications)
            if time.monotonic() - logged_at >= TELL_SECONDS:
                logged_at = time.monotonic()
                log_blockers(lockers(self._conn, list(together)))
            self._rest()


def knows_origins(conn: psycopg.Connection[Any]) -> bool:
    """Whether any transaction of the source may have an origin, that is, whether any replication origin exists."""
    row = conn.execute("SELECT EXISTS (SELECT FROM pg_replication_origin)").fetchone()
    return row is not None and bool(row[0])


def described(relation: Relation) -> RelationKey:
    """The key of a relation in :data:`Described`."""
    return relation.relation_id, frozenset(column.type_oid for column in relation.columns)


def facts_of(relations: Sequence[Relation], describe: Describe) -> list[RelationFacts]:
    """The catalog's current facts for each of these relations, in the same order."""
    known = describe(relations)
    return [known[described(relation)] for relation in relations]
