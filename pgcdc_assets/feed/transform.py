"""Derives the change feeds of tables from the rows of the log.

One Spark job derives the feeds of all tables. Each task of the job reads some segments of the log, and writes a file
per table. Then each feed gets one small Delta commit. Changes that a feed already contains (up to its ``changes_lsn``)
are derived again only on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import settle
from pgcdc_assets.delta.datafile import opened_parquet
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.file import trimmed
from pgcdc_assets.feed.plan import FeedPlan, Followed, Router, planned
from pgcdc_assets.feed.schema import FeedEnd, FeedPart
from pgcdc_assets.feed.table import Feeds
from pgcdc_assets.feed.task import Derivation, Derived, FeedTarget, derive
from pgcdc_assets.log.reader import Segment
from pgcdc_assets.log.segment import OWN_FILE_BYTES
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.spark.tasks import cores, run_tasks

TASK_BYTES = 4 << 20
"""A task gets at least this many bytes of compressed segments, which it decodes in about 0.3 s."""
BUCKET_ROWS = 400_000
"""A bucket of keys has at most about this many changes. One task applies it, and needs about 300 MB of memory for a
wide table."""
BUCKET_BYTES = 64 << 20
"""At most about this many bytes of messages are in one bucket. In memory they take three to four times as much."""
MOST_BUCKETS = 256
"""The largest number of buckets, because a task has one file per bucket open, or two if keys change."""


def transform(
    spark: SparkSession, span: LogSpan, feeds: Feeds, tables: Sequence[Followed], *, again: bool = False,
    router: Router | None = None,
) -> dict[TableName, FeedPart]:  # fmt: skip
    """Derives the feeds of ``tables`` to the end of ``span``, and returns each table's changes in the span.

    ``span`` ends at a boundary up to which the log is complete. With ``again``, the changes of the whole span are
    derived again, and replace the changes that the feeds have. If a table's changes cannot be derived to the end of the
    span, ``ended`` is set in the table's result; other tables are not affected. ``router``: a router for all mirrored
    tables, needed if ``tables`` does not contain all of them.
    """
    router = router or Router.of(entry.table for entry in tables)
    plans, failures = planned(span, feeds, router, tables, again=again)
    parts = {name: _nothing(table, after, failure) for name, (table, after, failure) in failures.items()}
    done = _derived(spark, span, [plan for plan in plans if plan.todo is not None])
    _check_taken(span, router, plans, done)
    written: list[Location] = []
    for plan in plans:
        with contained() as failed:
            parts[plan.table.name] = _committed(plan, done, span.lsns.end, written)
        if failed.reason is not None:
            parts[plan.table.name] = _nothing(plan.table, plan.after, failed.reason)
    # Feeds must be durable before mirrors apply them.
    settle(written)
    return parts


def _nothing(table: Table, after: Lsn, failure: str) -> FeedPart:
    return FeedPart(table, LsnRange(after, after), (), FeedEnd(after, failure))


def _committed(plan: FeedPlan, done: Derived, span_end: Lsn, written: list[Location]) -> FeedPart:
    """Commits a table's derived files to its feed. After a Delta commit, adds the feed's folder to ``written``, because
    the caller must make the commit durable."""
    feed, ended = plan.feed, None
    if plan.todo is not None:
        files, ended, end = done.files.get(plan.table.name, []), done.ended.get(plan.table.name), plan.todo.end
        if ended is not None:
            end = ended.lsn
            files = [part for file in files if (part := trimmed(feed.path, file, end)) is not None]
        if ended is not None and plan.again:
            # The changes were to be derived again, but this is not possible. Leave the feed unchanged.
            return FeedPart(plan.table, LsnRange(plan.after, plan.after), (), ended)
        if files or plan.replaced:
            written.append(feed.path)
            span = LsnRange(min(plan.todo.start, end), end)
            feed.commit(files, span, plan.replaced, plan.unchanged_from, plan.replay_lsn)
    if ended is not None and ended.lsn >= span_end:
        # The row that cannot be derived is above the span. A later transform will find it again.
        ended = None
    end = span_end if ended is None else ended.lsn
    taken = LsnRange(min(plan.after, end), end)
    return FeedPart(plan.table, taken, tuple(feed.files(taken)), ended)


def _derived(spark: SparkSession, span: LogSpan, plans: Sequence[FeedPlan]) -> Derived:
    relations = {relation for plan in plans for relation in plan.relations}
    if not relations:
        return Derived()
    unread: dict[int, dict[TableName, str]] = {}
    for plan in plans:
        for schema_id, reason in plan.unread.items():
            unread.setdefault(schema_id, {})[plan.table.name] = reason
    todo = {plan.table.name: plan.todo for plan in plans if plan.todo is not None}
    hull = LsnRange(min(lsns.start for lsns in todo.values()), max(lsns.end for lsns in todo.values()))
    segments = span.part(hull).segments(relations)
    if not segments:
        return Derived()
    sizes = _sizes(span.part(hull), segments)
    base = Derivation(
        segments=(),
        targets={
            plan.table.name: FeedTarget(
                plan.table, plan.feed.path, lsns, _buckets(span.part(lsns), plan.relations, sizes, again=plan.again),
            )
            for plan in plans if (lsns := todo.get(plan.table.name)) is not None
        },
        routes={schema_id: route for plan in plans for schema_id, route in plan.routes.items()},
        unread=unread,
    )  # fmt: skip
    tasks = [replace(base, segments=tuple(s.file for s in group)) for group in grouped(segments, 2 * cores(spark))]
    return _together(run_tasks(spark, derive, tasks))


def grouped(segments: Sequence[Segment], most: int) -> list[list[Segment]]:
    """Divides segments, in commit order, into at most ``most`` groups of similar size, each of at least about
    TASK_BYTES."""
    total = sum(segment.size for segment in segments)
    count = max(1, min(most, total // TASK_BYTES, len(segments)))
    groups: list[list[Segment]] = [[] for _ in range(count)]
    taken = 0
    for segment in sorted(segments, key=lambda s: (s.commit_min or 0, s.path.name)):
        groups[min(taken * count // max(total, 1), count - 1)].append(segment)
        taken += segment.size
    return [group for group in groups if group]


def _together(results: Iterable[Derived]) -> Derived:
    found = Derived()
    for result in results:
        for name, files in result.files.items():
            found.files.setdefault(name, []).extend(files)
        for name, end in result.ended.items():
            found.ended[name] = min(found.ended.get(name, end), end, key=lambda end: end.lsn)
        found.taken.update(result.taken)
    return found


def _check_taken(span: LogSpan, router: Router, plans: Sequence[FeedPlan], done: Derived) -> None:
    """Compares the number of rows that the tasks derived for each table with the number that the receiver counted for
    the table's relations. If the numbers differ, the table's feed ends at the start of the span, and the table is set
    aside. So an error in this package cannot lose a row unnoticed."""
    for plan in plans:
        if plan.todo is None:
            continue
        name, of = plan.table.name, span.part(plan.todo).rows
        held, taken = sum(of[relation].total() for relation in router.relations(name) & of.keys()), done.taken[name]
        if name not in done.ended and held != taken:
            reason = f"the log has {held} rows of the table in {plan.todo}, but {taken} were written to the feed"
            done.ended[name] = FeedEnd(plan.todo.start, reason)


@dataclass(frozen=True)
class _Size:
    """The bytes of a row group of the log, whose rows have relation ids from ``low`` to ``high``."""

    low: int
    high: int
    bytes: int

    def of(self, relations: frozenset[int]) -> int:
        """Estimates how many bytes of the row group belong to these relations. If the row group has rows of several
        relations, the estimate is OWN_FILE_BYTES or a quarter of the row group, whichever is larger. Usually it is too
        high, which is safe."""
        if not any(self.low <= relation <= self.high for relation in relations):
            return 0
        return self.bytes if self.low == self.high else max(min(self.bytes, OWN_FILE_BYTES), self.bytes // 4)


def _sizes(span: LogSpan, segments: Sequence[Segment]) -> list[_Size]:
    """Reads the sizes of all row groups from the files' footers. Usually all batches together have at most
    BUCKET_BYTES. Then no table exceeds the size of a bucket, so this function reads nothing and returns an empty
    list."""
    if sum(batch.bytes for batch in span.batches) <= BUCKET_BYTES:
        return []
    found = []
    for segment in segments:
        with opened_parquet(segment.path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        place = file.schema_arrow.get_field_index("relation_id")
        for group in groups:
            bounds = group.column(place).statistics
            if bounds is not None and bounds.has_min_max:
                found.append(_Size(bounds.min, bounds.max, group.total_byte_size))
    return found


def _buckets(
    span: LogSpan, relations: frozenset[int], sizes: Sequence[_Size], *, again: bool = False
) -> int:  # fmt: skip
    """Returns the number of key buckets of a table, so that each has at most about BUCKET_ROWS and BUCKET_BYTES. If
    there are only inserts, they are not divided, because an apply adds them to the mirror without a merge. With
    ``again``, they are divided too, because a repair merges them."""
    kinds = span.kinds(relations)
    rows = sum(kinds[kind] for kind in "IUD")
    if not again and rows == kinds["I"] and not kinds["T"]:
        return 1
    size = sum(one.of(relations) for one in sizes)
    return max(1, min(max(-(-rows // BUCKET_ROWS), -(-size // BUCKET_BYTES)), MOST_BUCKETS, rows))
