"""Hypothesis strategies that damage the input of parsers: they change, cut or insert bytes, or replace values of
JSON."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import assume
from hypothesis import strategies as st

VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1 << 70, 0.5, float("inf"), "", "x", "0/0", "1", "FFFFFFFF/FFFFFFFF", [], {}, [[]], {"a": {}},
     "\x00\ud800"]
)  # fmt: skip
_PIECES = [b"", b"\0", b"\xff\xfe", b"0", b"-1", b'"', b"{", b"}", b"[" * 1200, b"null", b"\n", b"&a", b"*a", b"1e999"]


class Content(bytes):
    """A file's bytes with a short repr, because Hypothesis would print all bytes."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with one to three changes, or random bytes instead of the content."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=64) | st.sampled_from(_PIECES))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        gone = draw(st.sampled_from([0, 0, 1, 1, 2, 7, len(content)]))
        content = content[:at] + draw(st.binary(max_size=4) | st.sampled_from(_PIECES)) + content[at + gone :]
    return content


@st.composite
def otherwise(draw: st.DrawFn, value: Any) -> Any:
    """The JSON value with one value replaced, missing or added. If a string contains JSON, values inside of this string
    may change, too."""
    if isinstance(value, str) and value[:2] in ('{"', '["'):
        return json.dumps(draw(otherwise(json.loads(value))))
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        name = draw(st.sampled_from(sorted(value)))
        kind = draw(st.sampled_from(["inside", "inside", "inside", "missing", "more"]))
        if kind == "inside":
            return {**value, name: draw(otherwise(value[name]))}
        return {key: one for key, one in value.items() if key != name} if kind == "missing" else {**value, "odd": 1}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(otherwise(value[at])), *value[at + 1 :]]
    return draw(VALUES)


@st.composite
def damaged_json(draw: st.DrawFn, content: bytes) -> bytes:
    """A JSON file, or a file with one JSON value per line, with damaged text or changed values."""
    if draw(st.booleans()):
        return draw(damaged(content))
    lines = content.splitlines()
    if len(lines) < 2 or not all(line[:1] == b"{" and line[-1:] == b"}" for line in lines):
        return json.dumps(draw(otherwise(json.loads(content)))).encode()
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = json.dumps(draw(otherwise(json.loads(lines[at])))).encode()
    return b"\n".join(lines) + b"\n"


@st.composite
def damaged_parquet(draw: st.DrawFn, content: bytes) -> bytes:
    """A damaged Parquet file: with damaged bytes, a changed value in a row, or a column that is missing or has a
    different type."""
    if draw(st.booleans()):
        return draw(damaged(content))
    table = pq.read_table(BytesIO(content))
    rows, name = table.to_pylist(), draw(st.sampled_from([*table.column_names, ""]))
    at = draw(st.integers(0, len(rows) - 1))
    rows[at] = draw(otherwise(rows[at]))
    made = BytesIO()
    try:
        fields = [field for field in table.schema if field.name != name]
        pq.write_table(pa.Table.from_pylist(rows, pa.schema(fields) if draw(st.booleans()) else None), made)
    except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
        assume(False)
    return made.getvalue()
