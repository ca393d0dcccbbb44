"""The scalar and the columnar decoder of row messages agree, for any relation, tuples, batch and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.columns import images
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.layouts import RowKind
from pgcdc_assets.protocol.messages import UNCHANGED, Delete, Insert, Message, OldKind, TupleData, Update, Value
from tests.protocol import wire
from tests.protocol.examples import EXAMPLES, messages

RELATION = 0x4E4F_4B75
"""An OID whose bytes are letters of the protocol."""
KINDS = st.sampled_from(get_args(RowKind))
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20) | st.sampled_from(
    ["n", "u", "t", "tN\x01", "N", "KKO", "é" * 9]
)
VALUES: st.SearchStrategy[Value] = st.none() | st.just(UNCHANGED) | TEXTS


def tuples(columns: int) -> st.SearchStrategy[TupleData]:
    return st.tuples(*[VALUES] * columns)


def row_messages(kind: RowKind, columns: int) -> st.SearchStrategy[wire.RowMessage]:
    old = st.tuples(st.sampled_from(get_args(OldKind)), tuples(columns))
    if kind == "I":
        return st.builds(Insert, st.just(RELATION), tuples(columns))
    if kind == "D":
        return st.builds(lambda item: Delete(RELATION, *item), old)
    return st.builds(
        lambda item, new: Update(RELATION, item[0], item[1], new), st.just((None, None)) | old, tuples(columns)
    )


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 12) -> tuple[RowKind, int, list[wire.RowMessage]]:
    kind, columns = draw(KINDS), draw(st.integers(0, 6))
    return kind, columns, draw(st.lists(row_messages(kind, columns), max_size=max_rows))


@st.composite
def arrays(draw: st.DrawFn, payloads: Sequence[bytes]) -> pa.Array | pa.ChunkedArray:
    """The payloads as one Arrow array, a slice of it, or chunks, with 32-bit or 64-bit offsets."""
    type_ = draw(st.sampled_from([pa.binary(), pa.large_binary()]))
    before = draw(st.lists(st.binary(max_size=9), max_size=2))
    sliced = pa.array([*before, *payloads, *draw(st.lists(st.binary(max_size=9), max_size=2))], type_).slice(
        len(before), len(payloads)
    )
    cuts = sorted(draw(st.lists(st.integers(0, len(payloads)), max_size=3)))
    if not cuts:
        return sliced
    edges = [0, *cuts, len(payloads)]
    return pa.chunked_array([sliced.slice(a, b - a) for a, b in pairwise(edges)], type_)


@given(batch=batches(), data=st.data())
def test_both_decoders_read_the_values_that_a_row_message_was_made_from(
    batch: tuple[RowKind, int, list[wire.RowMessage]], data: st.DataObject
) -> None:
    kind, columns, rows = batch
    payloads = [wire.row_message(row) for row in rows]
    assert [decode(payload) for payload in payloads] == rows
    found = images(data.draw(arrays(payloads)), kind, columns)
    assert messages(found, kind, RELATION, len(rows)) == rows


@st.composite
def mutated(draw: st.DrawFn, payload: bytes) -> bytes:
    """The message with some bytes changed, removed or inserted, or cut off at the end."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(payload)))
        gone = draw(st.sampled_from([0, 0, 1, 1, 1, 2, 5, len(payload)]))
        new = draw(st.binary(max_size=4) | st.sampled_from([b"n", b"u", b"t", b"b", b"N", b"K", b"O", b"\xff" * 4]))
        payload = payload[:at] + new + payload[at + gone :]
    return payload


def _at_its_lsn(error: ProtocolError) -> None:
    assert error.lsn == 77


def outcome(payload: bytes, kind: RowKind, columns: int) -> wire.RowMessage | None:
    """The row that the scalar decoder reads, for this kind and number of columns, or None if it refuses the bytes."""
    try:
        message = decode(payload, Lsn(77))
    except ProtocolError as error:
        _at_its_lsn(error)
        return None
    if payload[:1] != kind.encode() or not isinstance(message, Insert | Update | Delete):
        return None
    held = [message.old] if isinstance(message, Delete) else [message.new]
    if isinstance(message, Update) and message.old is not None:
        held.append(message.old)
    return message if all(len(item) == columns for item in held) else None


def columnar_outcome(payload: Sequence[bytes], kind: RowKind, columns: int) -> list[wire.RowMessage] | None:
    lsns = pa.array([77] * len(payload), pa.int64())
    try:
        found = images(pa.array(payload, pa.binary()), kind, columns, lsns)
    except ProtocolError as error:
        _at_its_lsn(error)
        return None
    # The columnar decoder does not read the relation from the message, because the relation is a column of the log.
    rows = messages(found, kind, RELATION, len(payload))
    ids = [int.from_bytes(item[1:5], "big") for item in payload]
    return [replace(row, relation_id=relation_id) for row, relation_id in zip(rows, ids, strict=True)]


def assert_alike(payloads: Sequence[bytes], kind: RowKind, columns: int) -> None:
    expected = [outcome(payload, kind, columns) for payload in payloads]
    for payload, message in zip(payloads, expected, strict=True):
        assert columnar_outcome([payload], kind, columns) == (None if message is None else [message])
    together = columnar_outcome(payloads, kind, columns)
    assert together == (None if None in expected else expected)


@pytest.mark.long
@settings(max_examples=500)
@given(batch=batches(max_rows=3), data=st.data())
def test_both_decoders_agree_on_mutated_messages(
    batch: tuple[RowKind, int, list[wire.RowMessage]], data: st.DataObject
) -> None:
    kind, columns, rows = batch
    payloads = [wire.row_message(row) for row in rows]
    assert_alike([data.draw(mutated(payload)) if data.draw(st.booleans()) else payload for payload in payloads],
                 kind, columns)  # fmt: skip


@settings(max_examples=300)
@given(payloads=st.lists(st.binary(max_size=40), max_size=3), kind=KINDS, columns=st.integers(0, 3))
@example(payloads=[b"I" + bytes(4) + b"N\0\1t\0\0\0\0", b""], kind="I", columns=1)
def test_both_decoders_agree_on_random_bytes(payloads: list[bytes], kind: RowKind, columns: int) -> None:
    assert_alike(payloads, kind, columns)
    head = kind.encode() + bytes(4)
    assert_alike([head + payload for payload in payloads], kind, columns)


@settings(max_examples=500)
@given(payload=st.sampled_from([payload for payload, _ in EXAMPLES]).flatmap(mutated) | st.binary(max_size=60))
def test_any_bytes_are_decoded_as_a_message_or_refused_with_a_protocol_error(payload: bytes) -> None:
    try:
        message: Message = decode(payload, Lsn(77))
    except ProtocolError as error:
        _at_its_lsn(error)
    else:
        assert isinstance(message, get_args(Message))
