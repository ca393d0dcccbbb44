"""Feeds derived from early files, which have commit facts, equal the feeds of the same rows in ordinary files."""

from __future__ import annotations

import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings

from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import dataset
from pgcdc_assets.feed import messages
from pgcdc_assets.feed.events import Route
from pgcdc_assets.feed.routing import Router
from pgcdc_assets.feed.schema import FeedFile, feed_schema
from pgcdc_assets.feed.task import Derivation, FeedTarget, derive
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.span import LogSpan, facts_of
from pgcdc_assets.store.local import path_of
from tests.log.twins import BATCHES, TABLES, Change, Transaction, spans, twins, whole

INSERTS = tuple(Change("I", 1 + at % 2, 0, at % 3, bytes([at])) for at in range(12))
HISTORY = (
    (Transaction(INSERTS, (1,), files=3), Transaction((Change("T", 2, 0, 0, b""), Change("M", 1, 0, 1, b"m")), (1,))),
    (Transaction((Change("I", 1, 0, 1, b"x"), Change("I", 1, 0, 0, b"y")), (1,), "elsewhere"),),
)


def _derived(log: ChangeLog, span: LsnRange) -> tuple[dict[TableName, list[Any]], Any]:
    """The feed rows that one task derives from a span, and the task's other results."""
    router = Router.of(TABLES.values())
    shapes = log.shapes(span).values()
    task = Derivation(
        segments=tuple(segment.file for segment in log.segments(span)),
        targets={t.name: FeedTarget(t, log.layout.changes(t.name), span) for t in TABLES.values()},
        routes={
            s.schema_id: Route.of(s, t) for s in shapes for t in TABLES.values() if router.place(s).table == t.name
        },
    )
    for target in task.targets.values():
        path_of(target.folder).mkdir(parents=True, exist_ok=True)
    done = derive(pickle.loads(pickle.dumps(task)))
    feeds = {t.name: _rows(log, t.name, done.files.get(t.name, []), feed_schema(t)) for t in TABLES.values()}
    return feeds, (done.ended, done.taken)


def _rows(log: ChangeLog, name: TableName, files: list[FeedFile], schema: pa.Schema) -> list[Any]:
    folder = log.layout.changes(name)
    rows = dataset([folder / file.report.path for file in files], schema).to_table()
    return sorted(rows.to_pylist(), key=str)


def test_commit_facts_give_the_same_feeds_for_a_fixed_history(tmp_path: Path) -> None:
    plain, early = twins(tmp_path, HISTORY)
    for span in spans(plain):
        assert _derived(early, span) == _derived(plain, span)
        assert _messages(early, span) == _messages(plain, span)


@pytest.mark.long
@settings(max_examples=10)
@given(BATCHES)
def test_commit_facts_give_the_same_feeds_for_any_history(batches: list[list[Transaction]]) -> None:
    """The feed of messages, and the shapes of rows, are compared as well."""
    with TemporaryDirectory() as folder:
        plain, early = twins(Path(folder), batches)
        ids = set(plain.shapes(whole(plain)))
        assert facts_of(early, ids) == facts_of(plain, ids)
        for span in spans(plain):
            assert _derived(early, span) == _derived(plain, span)
            assert _messages(early, span) == _messages(plain, span)
            for one in ids:
                used = [LogSpan(log, span).used({one}, {1, 2, 3}) for log in (early, plain)]
                assert used[0] == used[1]
            # Only rows that were written before their commit have these provisional schema_ids.
            assert LogSpan(early, span).used(set(range(6)), {1, 2, 3}) == set()


def _messages(log: ChangeLog, span: LsnRange) -> tuple[list[Any], Any]:
    path_of(log.layout.messages).mkdir(parents=True, exist_ok=True)
    files, taken = messages.derived(log.layout.messages, LogSpan(log, span))
    rows = dataset([log.layout.messages / file.path for file in files], messages.SCHEMA).to_table()
    # The rows are sorted here, because readers of the feed sort them as well.
    return sorted(rows.to_pylist(), key=str), taken
