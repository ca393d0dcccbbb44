"""Names for numpy arrays, and the functions on numpy and Arrow arrays that several packages share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Octets = NDArray[np.uint8]
Words = NDArray[np.uint64]


def whole(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The values as one array without chunks."""
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def in_arrow(values: Ints) -> pa.Int64Array:
    """The numbers as an Arrow array, without a copy. Unlike ``pa.array`` this does not import pandas."""
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def in_numpy(values: pa.Array) -> NDArray[Any]:
    """The numbers as a numpy array, without a copy and without importing pandas. No number may be NULL."""
    kind = values.type.to_pandas_dtype()
    return np.frombuffer(values.buffers()[1], kind)[values.offset : values.offset + len(values)]


def first_of_groups(group: Ints, counts: Ints) -> Ints:
    """The indexes of the first ``counts[g]`` entries of every group g, ordered by group. ``group``: each entry's
    group."""
    order = np.argsort(group, kind="stable")
    sorted_group = group[order]
    starts = np.flatnonzero(np.diff(sorted_group, prepend=-1))
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return order[place < counts[sorted_group]]


def list_texts(lists: pa.ListArray, elements: pa.StringArray) -> pa.StringArray:
    """For each list, its elements' texts joined by commas; NULL for a NULL list. ``elements`` has a text without a
    comma for each element of ``lists.flatten()``. Arrow can compare and dictionary-encode texts, but not lists."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    texts = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), elements), ",")
    return pc.if_else(lists.is_valid(), texts, None)


def mixed(values: Words) -> Words:
    """The last step of SplitMix64, as a hash function: every bit of the input affects every bit of the output."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
