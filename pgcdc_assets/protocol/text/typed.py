"""Converts columns of PostgreSQL's text form to typed columns, for snapshot copies and changes. If a value does not fit
the column's Arrow type, its text is stored in ``_pgcdc_raw``, a map from column name to text."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Ints, Words, mixed, whole
from pgcdc_assets.core.catalog import PgType
from pgcdc_assets.protocol.text.strings import laid_out
from pgcdc_assets.protocol.text.types import cast

RAW_TYPE: Final = pa.map_(pa.string(), pa.string())

_UNSIGNED = np.uint64
_FACTOR: Final = 0x9E3779B97F4A7C15
"""The fractional digits of the golden ratio, as in many hash functions. The number is odd, so it has an inverse modulo
2^64."""
_INVERSE: Final = pow(_FACTOR, -1, 1 << 64)


class TextColumn(Protocol):
    """A column with the attributes that a cast needs, such as core's Column and protocol's ShapeColumn."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> PgType: ...


@dataclass(frozen=True)
class Typed:
    values: list[pa.Array]
    """One array per column, with the column's ``arrow_type``."""
    raw: pa.Array
    """map<string, string>: the column name and text of each value that does not fit its type. NULL for rows in which
    all values fit."""


def typed(text: Sequence[pa.Array | pa.ChunkedArray], columns: Sequence[TextColumn], rows: int) -> Typed:
    """Casts the values of each column from text to the column's type. ``rows``: the number of rows. Raises
    ProtocolError for a text that PostgreSQL never writes for the column's type."""
    values: list[pa.Array] = []
    misfits: list[tuple[str, Ints, pa.Array]] = []
    for array, column in zip(text, columns, strict=True):
        done = cast(array, column.type)
        values.append(done.values)
        if done.unfit is not None and done.unfit.any():
            at = np.flatnonzero(done.unfit)
            misfits.append((column.name, at, array.take(pa.array(at)).cast(pa.string())))
    return Typed(values, _raw(misfits, rows))


def _raw(misfits: Sequence[tuple[str, Ints, pa.Array]], rows: int) -> pa.Array:
    if not misfits:
        return pa.nulls(rows, RAW_TYPE)
    at = np.concatenate([places for _, places, _ in misfits])
    order = np.argsort(at, kind="stable")
    names = pa.concat_arrays([pa.repeat(name, len(places)) for name, places, _ in misfits])
    texts = pa.chunked_array([whole(text) for _, _, text in misfits], pa.string()).combine_chunks()
    counts = np.bincount(at, minlength=rows)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    keys, items = names.take(pa.array(order)), texts.take(pa.array(order))
    return pa.MapArray.from_arrays(pa.array(offsets), keys, items, RAW_TYPE, mask=pa.array(counts == 0))


def row_hash(text: Sequence[pa.Array | pa.ChunkedArray], names: Sequence[str], rows: int) -> pa.Array:
    """Returns an int64 hash for each row, computed from the texts of values that are not NULL, and the names of their
    columns. The order of the columns does not matter, and a new column that is NULL does not change the hash. Rows with
    equal hashes are still compared value by value. Mirrors store these hashes, so this function must never change."""
    total = np.zeros(rows, _UNSIGNED)
    for array, name in zip(text, names, strict=True):
        column = whole(array).cast(pa.string())
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        hashed = mixed(_text_hash(column) ^ _UNSIGNED(seed))
        total += np.where(np.asarray(column.is_valid()), hashed, _UNSIGNED(0))
    return pa.array(total.view(np.int64))


def _text_hash(text: pa.StringArray) -> Words:
    """Computes for each value a polynomial in ``_FACTOR`` over its bytes, plus its length. One running sum over the
    whole buffer, with increasing powers of ``_FACTOR``, contains the sums of all values. Each value's part of this sum
    is divided by the power at the value's start, so that the result does not depend on where the value starts."""
    octets, offsets = laid_out(text)
    sums = np.zeros(len(octets) + 1, _UNSIGNED)
    np.cumsum((octets.astype(_UNSIGNED) + _UNSIGNED(1)) * _powers(_FACTOR, len(octets)), out=sums[1:])
    spans = sums[offsets[1:]] - sums[offsets[:-1]]
    lengths = np.diff(offsets).astype(_UNSIGNED)
    return spans * _powers(_INVERSE, len(octets) + 1)[offsets[:-1]] + lengths


def _powers(base: int, count: int) -> Words:
    powers = np.full(count, base, _UNSIGNED)
    powers[:1] = 1
    return np.cumprod(powers, out=powers)


def row_identities(rows: int) -> pa.Array:
    """Makes ``_pgcdc_row`` for copied rows of a table without a key: texts that are never used twice."""
    numbers = pc.cast(pa.array(np.arange(rows, dtype=np.int64)), pa.string())
    return pc.binary_join_element_wise(pa.scalar(uuid.uuid4().hex), numbers, "-")
