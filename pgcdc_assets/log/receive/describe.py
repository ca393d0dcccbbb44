"""Asks the source's catalog about the relations that a stream describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from pgcdc_assets.log.receive.whole import Described, described
from pgcdc_assets.protocol.messages import Relation
from pgcdc_assets.source.catalog.tables import relation_facts


class CatalogFacts:
    """Asks about ``at_once`` relations in one query. ``between`` is called after each query: a transaction may touch
    thousands of tables, and the server must hear from us meanwhile."""

    def __init__(
        self, conn: psycopg.Connection[Any], publications: Sequence[str], at_once: int, between: Callable[[], None]
    ) -> None:
        self._conn = conn
        self._publications = publications
        self._at_once = at_once
        self._between = between

    def __call__(self, relations: Sequence[Relation]) -> Described:
        asked = sorted({described(relation) for relation in relations}, key=lambda one: one[0])
        found: Described = {}
        while asked:
            # A relation that comes twice, with other columns, is asked for in two rounds: a round takes each OID once.
            together = dict(asked[: self._at_once])
            answers = relation_facts(self._conn, together, self._publications)
            found |= {(oid, types): answers[oid] for oid, types in together.items()}
            asked = [one for one in asked if one not in found]
            self._between()
        return found


def knows_origins(conn: psycopg.Connection[Any]) -> bool:
    """Whether any transaction of the source may have an origin: one that is used has been created before."""
    row = conn.execute("SELECT EXISTS (SELECT FROM pg_replication_origin)").fetchone()
    return row is not None and bool(row[0])
