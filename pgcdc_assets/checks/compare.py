"""Compares the two sides of a table: the source and the mirror. From each row it computes two 64-bit digests, one of
the key and one of all values. Rows are matched by the digest of their key, and compared by the digest of their values.
If the sides differ, both are read again, to show examples of rows that differ.

The probability that a difference is missed is 2^-64 per row. This holds for any data, because each comparison uses a
new random seed."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgcdc_assets.checks.report import Example, TableReport
from pgcdc_assets.checks.sides import MirrorSide, Part, Side, SourceSide
from pgcdc_assets.core.arrays import Ints, Words, mixed
from pgcdc_assets.errors import CopyOutdated
from pgcdc_assets.source.snapshot.reading import read_whole

Digests = Words

ROWS_A_BUCKET = 1 << 20
"""The approximate number of rows in a bucket, which has the rows whose key digests begin with the same bits. A
comparison sorts one bucket of each side at a time, which takes about 100 MB."""
_MAX_BITS = 12

_ROW = np.dtype([("key", "<u8"), ("row", "<u8")])
EXAMPLES = 10
"""The number of differing rows shown for each table: enough to see a pattern, few enough to read."""
_SHOWN_LENGTH = 80


@dataclass(frozen=True)
class SourceDigests:
    """Digests of the rows that a table has on the source."""

    seed: Seed
    rows_expected: int
    store: DigestStore


@contextmanager
def source_digests(source: SourceSide, rows_expected: int) -> Iterator[SourceDigests]:
    """Read a table of the source into digests, which are deleted at the end of the ``with`` block. Raises CopyOutdated
    if the table was truncated, rewritten or altered, so that the snapshot no longer shows its rows."""
    with TemporaryDirectory(prefix="pgcdc-verify-") as folder:
        digests = SourceDigests(Seed(), rows_expected, DigestStore(Path(folder) / "source", rows_expected))
        _digest(source, source.comparison.key, digests.seed, digests.store)
        yield digests


def compare_sides(source: SourceSide, mirror: MirrorSide, read: SourceDigests | None = None) -> TableReport:
    """Read both sides at the same time and compare them. If they differ, read both again for examples. ``read``: the
    digests of the source if :func:`source_digests` has already read them."""
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
        examples: list[Example] = []
        if found.total:
            with suppress(CopyOutdated):  # The table was truncated or altered after the comparison.
                examples = _examples(source, mirror, seed, found)
        report = TableReport(
            comparison.table.name, here.rows, there.rows, found.missing, found.extra, found.different,
            tuple(examples), updates_seen=comparison.table.updates_seen,
        )  # fmt: skip
        reasons = [_of_inserts_only(report), *map(str, comparison.table.outside)]
        return replace(report, reason="; ".join(reason for reason in reasons if reason) or None)


def _of_inserts_only(report: TableReport) -> str | None:
    if report.updates_seen:
        return None
    told = "updates and deletes of this table are not applied"
    if report.equal:
        return told
    if report.explained:
        return f"{told}, so rows that the source changed or deleted differ; damage to these rows cannot be detected"
    return f"{told}, but this does not explain all missing rows"


def _digest(side: Side, key: list[int], seed: Seed, store: DigestStore) -> None:
    for part in side.parts(shown=False):
        for keys, rows in read_whole(partial(_digests, part, key, seed)):
            store.add(keys, rows)


def _digests(part: Part, key: list[int], seed: Seed) -> list[tuple[np.ndarray, np.ndarray]]:
    """Digests of the rows of a part: for each batch, one array for keys and one for whole rows. The digests of a whole
    part fit into memory, because they take 16 bytes per row."""
    found = []
    for batch in part():
        digests = [seed.of_texts(text) for text in batch.texts]
        keys = seed.of_rows([digests[place] for place in key], batch.rows)
        found.append((keys, seed.of_rows(digests, batch.rows)))
    return found


@dataclass(frozen=True)
class _Sample:
    """A row for an example. ``texts``: the comparable text of each column. ``shown``: the readable text of each key
    column, by the column's index."""

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
    """Maps each wanted key digest to the first row that has this digest."""
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
    """The value in readable form, or ``text`` if the value did not fit the mirror's column or was not read."""
    shown = text if value is None else "\\x" + value.hex() if isinstance(value, bytes) else str(value)
    return shown if shown is None or len(shown) <= _SHOWN_LENGTH else shown[: _SHOWN_LENGTH - 1] + "…"


@dataclass(frozen=True)
class Seed:
    """The random secret from which the digests of one comparison are computed. It must be the same for both sides."""

    value: int = field(default_factory=lambda: secrets.randbits(64))

    def of_texts(self, text: pa.Array) -> Digests:
        """One digest for each value of a string array. NULL and the empty string have different digests."""
        if not len(text):
            return np.empty(0, np.uint64)
        plain = text.cast(pa.large_string())
        _, offset_buffer, data = plain.buffers()
        bounds = np.frombuffer(offset_buffer, np.int64)[plain.offset : plain.offset + len(plain) + 1]
        lengths = np.diff(bounds)
        content = np.zeros(int(bounds[-1] - bounds[0]) + 8, np.uint8)
        if data is not None:
            content[:-8] = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
        sums = _sums_of_words(content, bounds[:-1] - bounds[0], lengths, np.uint64(self.value))
        digests = _mixed(sums + _mixed(lengths.astype(np.uint64) ^ np.uint64(self.value)))
        if plain.null_count:
            digests[plain.is_null().to_numpy(zero_copy_only=False)] = np.uint64(self.value)
        return digests

    def of_rows(self, columns: Sequence[Digests], rows: int) -> Digests:
        """One digest per row, from the digests of its columns in their order."""
        places = _mixed(np.arange(len(columns), dtype=np.uint64) + np.uint64(self.value ^ 0x5851F42D4C957F2D))
        total = np.zeros(rows, np.uint64)
        for place, column in zip(places, columns, strict=True):
            total += _mixed(column ^ place)
        return _mixed(total)


def _sums_of_words(content: npt.NDArray[np.uint8], starts: Digests, lengths: Digests, seed: np.uint64) -> Digests:
    """For each value, a sum over its 8-byte words, each mixed with its index. ``content`` is padded by 8 bytes."""
    words = (lengths + 7) // 8
    ends = np.cumsum(words)
    total = int(ends[-1]) if len(ends) else 0
    place = np.arange(total) - np.repeat(ends - words, words)
    at = np.repeat(starts, words) + 8 * place
    overlapping = np.ndarray((len(content) - 7,), "<u8", content.data, strides=(1,))
    value = overlapping[at]
    left = np.repeat(lengths, words) - 8 * place
    short = left < 8
    value[short] &= (np.uint64(1) << (8 * left[short]).astype(np.uint64)) - np.uint64(1)
    mixed = _mixed(value ^ _mixed(place.astype(np.uint64) + seed))
    running = np.concatenate((np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)))
    sums: Digests = running[ends] - running[ends - words]
    return sums


def _mixed(values: Digests) -> Digests:
    """One step of SplitMix64, a hash function for integers. It adds a constant first, because 0 would stay 0."""
    return mixed(values + np.uint64(0x9E3779B97F4A7C15))


class DigestStore:
    """The digests of one side of one table, on disk, divided into buckets by key."""

    def __init__(self, folder: Path, rows_expected: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._bits = min(_MAX_BITS, max(0, (rows_expected // ROWS_A_BUCKET).bit_length()))
        self.rows = 0

    @property
    def buckets(self) -> int:
        return 1 << self._bits

    def add(self, keys: Digests, rows: Digests) -> None:
        self.rows += len(keys)
        pairs = np.empty(len(keys), _ROW)
        pairs["key"], pairs["row"] = keys, rows
        if not self._bits:
            return self._append(0, pairs)
        bucket = keys >> np.uint64(64 - self._bits)
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(self.buckets + 1, dtype=np.uint64))
        for number in np.flatnonzero(np.diff(bounds)):
            self._append(int(number), pairs[order[bounds[number] : bounds[number + 1]]])
        return None

    def bucket(self, number: int) -> npt.NDArray[np.void]:
        path = self._folder / str(number)
        return np.fromfile(path, _ROW) if path.exists() else np.empty(0, _ROW)

    def _append(self, number: int, pairs: npt.NDArray[np.void]) -> None:
        with (self._folder / str(number)).open("ab") as file:
            file.write(pairs.tobytes())


@dataclass
class Differences:
    """The number of differing rows of each kind. ``keys``: for each kind, the key digests of a few of these rows, with
    which examples can be found."""

    missing: int = 0
    extra: int = 0
    different: int = 0
    keys: dict[str, list[int]] = field(default_factory=lambda: {"different": [], "missing": [], "extra": []})

    @property
    def total(self) -> int:
        return self.missing + self.extra + self.different


def compare(source: DigestStore, mirror: DigestStore, examples: int) -> Differences:
    """Compare both sides as multisets of rows. A row without an equal row on the other side is ``different`` if both
    sides have its key. Otherwise it is missing or extra."""
    found = Differences()
    for number in range(source.buckets):
        keys, surplus, lack = _unmatched(source.bucket(number), mirror.bucket(number))
        changed = np.minimum(surplus, lack)
        for kind, count in (("different", changed), ("missing", surplus - changed), ("extra", lack - changed)):
            setattr(found, kind, getattr(found, kind) + int(count.sum()))
            room = examples - len(found.keys[kind])
            found.keys[kind] += [int(key) for key in keys[count > 0][:room]]
    return found


def _unmatched(left: npt.NDArray[np.void], right: npt.NDArray[np.void]) -> tuple[Digests, Ints, Ints]:
    """The key digests of rows without an equal row on the other side, and for each key digest the number of these rows
    on the left and on the right."""
    keys = np.concatenate((left["key"], right["key"]))
    rows = np.concatenate((left["row"], right["row"]))
    sign = np.repeat(np.array([1, -1], np.int64), (len(left), len(right)))
    order = np.lexsort((rows, keys))
    keys, rows, sign = keys[order], rows[order], sign[order]
    if not len(keys):
        return keys, sign, sign
    starts = np.flatnonzero(np.concatenate(([True], (keys[1:] != keys[:-1]) | (rows[1:] != rows[:-1]))))
    net = np.add.reduceat(sign, starts)
    keys, net = keys[starts][net != 0], net[net != 0]
    unique, place = np.unique(keys, return_inverse=True)
    surplus, lack = np.zeros(len(unique), np.int64), np.zeros(len(unique), np.int64)
    np.add.at(surplus, place, np.maximum(net, 0))
    np.add.at(lack, place, np.maximum(-net, 0))
    return unique, surplus, lack
