"""Decoding a whole column in the server's encoding gives the same texts as decoding each value alone."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.protocol.text.strings import NotText, decoded, reread

ENCODINGS = [Encoding.of(name) for name in ("UTF8", "SQL_ASCII", "WIN1252", "KOI8U", "EUC_JP", "EUC_KR", "LATIN10")]
PIECES = st.sampled_from([b"", b"a", b"\xe9", b"\x81", b"\xc6\xfc", b"\xad\xa1", b"\x8f", b"\xff", b"\xc3\xa9", b"\n"])
VALUES = st.lists(st.none() | st.lists(PIECES, max_size=4).map(b"".join), max_size=8)


def _alone(raw: bytes | None, encoding: Encoding) -> str | None:
    return None if raw is None else encoding.decode(raw)


@given(VALUES, st.sampled_from(ENCODINGS), st.integers(0, 3))
@example([b"\x8f", None], Encoding.of("EUC_JP"), 0)
@example([b"\x8f\x8fa", b"\x8f"], Encoding.of("EUC_JP"), 0)
def test_columns_are_decoded_as_their_values(values: list[bytes | None], encoding: Encoding, cut: int) -> None:
    column = pa.array([b"cut off", *values], pa.binary()).slice(1)[cut:]
    values = values[cut:]
    for row, raw in enumerate(values):
        try:
            _alone(raw, encoding)
        except UnicodeDecodeError:
            with pytest.raises(NotText) as caught:
                decoded(column, encoding)
            assert caught.value.row == row
            break
    else:
        assert decoded(column, encoding).to_pylist() == [_alone(raw, encoding) for raw in values]
    shown = [None if raw is None else encoding.shown(raw) for raw in values]
    assert decoded(column, encoding, shown=True).to_pylist() == shown


def test_zero_byte_in_a_text_is_refused() -> None:
    with pytest.raises(NotText) as caught:
        decoded(pa.array([b"\xe9", b"a\0b"]), Encoding.of("WIN1252"))
    assert caught.value.row == 1


def test_names_that_were_not_text_are_decoded_again_by_column() -> None:
    win1252, utf8 = Encoding.of("WIN1252"), Encoding.of("UTF8")
    names = pa.chunked_array([pa.array(["a", None, utf8.shown(b"\xe9")]), pa.array(["a"])])
    assert reread(names, win1252).to_pylist() == ["a", None, "é", "a"]
    assert reread(names, utf8) is names
