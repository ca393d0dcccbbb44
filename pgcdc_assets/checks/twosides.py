"""Compares the two sides of a table. Both sides are read as digests of rows. If they differ, both are read again, to
show examples of rows that differ."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pgcdc_assets.checks.compared import MirrorSide, Part, Side, SourceSide
from pgcdc_assets.checks.digest import Differences, DigestStore, Seed, compare
from pgcdc_assets.checks.report import Example, TableReport
from pgcdc_assets.errors import CopyOutdated
from pgcdc_assets.source.snapshot.reading import read_whole

EXAMPLES = 10
"""Rows that are shown for each table: enough to see a pattern, few enough to read."""
_SHOWN_LENGTH = 80


@dataclass(frozen=True)
class SourceDigests:
    """The digests of a table's rows on the source."""

    seed: Seed
    rows_expected: int
    store: DigestStore


@contextmanager
def source_digests(source: SourceSide, rows_expected: int) -> Iterator[SourceDigests]:
    """Read a table of the source into digests, which exist until the end of the block. Raises CopyOutdated if the table
    is not as the snapshot shows it."""
    with TemporaryDirectory(prefix="pgcdc-verify-") as folder:
        digests = SourceDigests(Seed(), rows_expected, DigestStore(Path(folder) / "source", rows_expected))
        _digest(source, source.comparison.key, digests.seed, digests.store)
        yield digests


def compare_sides(source: SourceSide, mirror: MirrorSide, read: SourceDigests | None = None) -> TableReport:
    """Read both sides at the same time and compare them. If they differ, read both again for examples.

    ``read``: the source's digests, if they have already been read.
    """
    comparison = source.comparison
    rows_expected = read.rows_expected if read else max(mirror.mirror.count(), comparison.table.rows)
    seed = read.seed if read else Seed()
    with TemporaryDirectory(prefix="pgcdc-verify-") as folder, ThreadPoolExecutor(2) as pool:
        here = read.store if read else DigestStore(Path(folder) / "source", rows_expected)
        there = DigestStore(Path(folder) / "mirror", rows_expected)
        sides: list[tuple[Side, DigestStore]] = [(mirror, there)] if read else [(source, here), (mirror, there)]
        for job in [pool.submit(_digest, side, comparison.key, seed, store) for side, store in sides]:
            job.result()
        found = compare(here, there, EXAMPLES)
        report = TableReport(
            comparison.table.name, here.rows, there.rows, found.missing, found.extra, found.different,
            tuple(_shown_examples(source, mirror, seed, found)) if found.total else (),
            updates_seen=comparison.table.updates_seen,
        )  # fmt: skip
        reasons = [_of_inserts_only(report), *map(str, comparison.table.outside)]
        return replace(report, reason="; ".join(reason for reason in reasons if reason) or None)


def _shown_examples(source: SourceSide, mirror: MirrorSide, seed: Seed, found: Differences) -> list[Example]:
    """Examples of rows that differ. There are none if the table was truncated or altered after the comparison. The
    difference is reported all the same."""
    try:
        return _examples(source, mirror, seed, found)
    except CopyOutdated:
        return []


def _of_inserts_only(report: TableReport) -> str | None:
    if report.updates_seen:
        return None
    told = "its updates and deletes are not applied"
    if report.equal:
        return told
    if report.explained:
        return f"{told}: rows that the source changed or deleted since; a damaged row could not be told from them"
    return f"{told}, but no update and no delete explains all that is missing"


def _digest(side: Side, key: list[int], seed: Seed, store: DigestStore) -> None:
    for part in side.parts(shown=False):
        for keys, rows in read_whole(partial(_digests, part, key, seed)):
            store.add(keys, rows)


def _digests(part: Part, key: list[int], seed: Seed) -> list[tuple[np.ndarray, np.ndarray]]:
    """Digests of the keys and of the rows. They take 16 bytes per row, so they can be kept until the part ends."""
    found = []
    for batch in part():
        digests = [seed.of_texts(text) for text in batch.texts]
        keys = seed.of_rows([digests[place] for place in key], batch.rows)
        found.append((keys, seed.of_rows(digests, batch.rows)))
    return found


@dataclass(frozen=True)
class _Sample:
    """A row to show: its comparable texts, one per column, and its key in readable form, by the column's place."""

    texts: list[str | None]
    shown: dict[int, str | None]


def _examples(source: SourceSide, mirror: MirrorSide, seed: Seed, found: Differences) -> list[Example]:
    comparison = source.comparison
    turns = zip_longest(*([(kind, key) for key in keys] for kind, keys in found.keys.items()))
    chosen = [pick for pick in chain.from_iterable(turns) if pick is not None][:EXAMPLES]
    wanted = np.array([key for _, key in chosen], np.uint64)
    here, there = (_sampled(side, comparison.key, seed, wanted) for side in (source, mirror))
    examples = []
    for kind, key in chosen:
        left, right = here.get(key), there.get(key)
        row = right if kind == "extra" else left
        if row is None:
            continue
        changed: tuple[str, ...] = ()
        if kind == "different" and left and right:
            pairs = zip(comparison.names, left.texts, right.texts, strict=True)
            changed = tuple(name for name, a, b in pairs if a != b)
        examples.append(Example(kind, {comparison.names[place]: row.shown[place] for place in comparison.key}, changed))
    return examples


def _sampled(side: Side, key: list[int], seed: Seed, wanted: np.ndarray) -> dict[int, _Sample]:
    """The first row of each wanted key digest."""
    samples: dict[int, _Sample] = {}
    for part in side.parts(shown=True):
        for digest, sample in read_whole(partial(_samples, part, key, seed, wanted)):
            samples.setdefault(digest, sample)
    return samples


def _samples(part: Part, key: list[int], seed: Seed, wanted: np.ndarray) -> list[tuple[int, _Sample]]:
    found: dict[int, _Sample] = {}
    for batch in part():
        keys = seed.of_rows([seed.of_texts(batch.texts[place]) for place in key], batch.rows)
        for at in np.flatnonzero(np.isin(keys, wanted)):
            row = int(at)
            texts = [text[row].as_py() for text in batch.texts]
            values = {place: array[row].as_py() for place, array in batch.shown.items()}
            shown = {place: _readable(values.get(place), texts[place]) for place in key}
            found.setdefault(int(keys[row]), _Sample(texts, shown))
    return list(found.items())


def _readable(value: object, text: str | None) -> str | None:
    """The value in readable form. If the value is None, because it did not fit the mirror's column or was not read,
    this is ``text``."""
    shown = text if value is None else "\\x" + value.hex() if isinstance(value, bytes) else str(value)
    return shown if shown is None or len(shown) <= _SHOWN_LENGTH else shown[: _SHOWN_LENGTH - 1] + "…"
