"""Typed rows: values that do not fit their type, and the hash of a row."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.catalog import Column, PgType
from pgcdc_assets.protocol.text.typed import row_hash, row_identities, typed

NUMERIC = Column(1, "amount", PgType(1700, "numeric", (10 << 16 | 2) + 4))
TEXT = Column(2, "Note", PgType(25, "text"))
DATE = Column(3, "day", PgType(1082, "date"))

texts = st.none() | st.text(max_size=12)


def test_values_that_fit_have_no_raw_text() -> None:
    done = typed([pa.array(["1.5", None]), pa.array(["", None])], [NUMERIC, TEXT], 2)
    assert [str(value) for value in done.values[0].to_pylist()] == ["1.50", "None"]
    assert done.values[1].to_pylist() == ["", None]
    assert done.raw.null_count == 2


def test_values_that_do_not_fit_are_kept_as_text() -> None:
    text = [
        pa.array(["NaN", "1", "NaN", None]),
        pa.array(["a", "b", "c", "d"]),
        pa.array(["infinity", "2024-02-29", "0044-03-15 BC", "2024-01-01"]),
    ]
    done = typed(text, [NUMERIC, TEXT, DATE], 4)
    done.raw.validate(full=True)
    assert [value and dict(value) for value in done.raw.to_pylist()] == [
        {"amount": "NaN", "day": "infinity"},
        None,
        {"amount": "NaN", "day": "0044-03-15 BC"},
        None,
    ]
    assert done.values[0].is_null().to_pylist() == [True, False, True, True]


def test_chunks_and_slices_are_typed_by_row() -> None:
    chunked = pa.chunked_array([["1", "NaN"], ["3"]])
    done = typed([chunked, pa.array(["x", "a", "b", "c"]).slice(1)], [NUMERIC, TEXT], 3)
    assert [value and dict(value) for value in done.raw.to_pylist()] == [None, {"amount": "NaN"}, None]


@given(st.lists(st.tuples(texts, texts), max_size=20), st.integers(0, 20))
def test_hash_depends_only_on_the_values_of_the_row(rows: list[tuple[str | None, str | None]], start: int) -> None:
    """The hash must not depend on the row's position, the other rows, the order of columns, or a column of NULLs."""
    left = pa.array([row[0] for row in rows], pa.string())
    right = pa.array([row[1] for row in rows], pa.string())
    whole = row_hash([left, right], ["a", "b"], len(rows))
    start = min(start, len(rows))
    part = row_hash(
        [pa.nulls(len(rows) - start, pa.string()), right.slice(start), left.slice(start)],
        ["added", "b", "a"], len(rows) - start,
    )  # fmt: skip
    assert part.equals(whole.slice(start))
    by_row = dict(zip(rows, whole.to_pylist(), strict=True))
    # The hash has 64 bits. A collision among twenty rows would be a fault of the hash function.
    assert len(set(by_row.values())) == len(by_row)


def test_similar_rows_have_different_hashes() -> None:
    rows = [("", None), (None, ""), ("a", "b"), ("b", "a"), ("ab", ""), ("\1", ""), ("\1\1", ""), ("a\1", "")]
    text = [pa.array([row[at] for row in rows], pa.string()) for at in (0, 1)]
    assert len(set(row_hash(text, ["x", "y"], len(rows)).to_pylist())) == len(rows)


def test_hash_never_changes() -> None:
    """Mirrors store the hash. With another hash function, rows that were copied before would not be found."""
    text = [pa.array(["1", None, "größe"]), pa.array(["2024-01-01", "x" * 100, None])]
    fixed = [4091292991121921067, -3614613800946456788, 7368843869587773030]
    assert row_hash(text, ["id", "day"], 3).to_pylist() == fixed


def test_row_identities_are_unique() -> None:
    both = row_identities(1000).to_pylist() + row_identities(1000).to_pylist()
    assert len(set(both)) == 2000
