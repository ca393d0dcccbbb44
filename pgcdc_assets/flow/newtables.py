"""Adds new tables and partitions to the publications that setup made."""

from __future__ import annotations

from typing import Any

import psycopg

from pgcdc_assets.core.catalog import Catalog, relations_of
from pgcdc_assets.flow.observer import Observer
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.publications import OwnPair


def publish_new(
    conn: psycopg.Connection[Any], settings: Settings, catalog: Catalog, states: TableStates, observer: Observer
) -> None:  # fmt: skip
    """Publish the tables and partitions that match the setting ``tables`` and are in no publication yet, and report
    them. Tables that ``catalog`` or ``states`` know were published before; their publication stays as it is."""

    def known() -> set[int]:
        return relations_of([*catalog.tables, *states.tables()])

    for name in OwnPair.of(conn, settings).add_new(known):
        observer.progress("watch", f"table {name}: came, and is published from now on")
