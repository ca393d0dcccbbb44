"""Decoding text from a server's encoding. Invalid bytes are refused, or marked so that the decoded text shows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.encoding import UTF8, Encoding, marked
from pgcdc_assets.errors import UsageError

WIN1252, EUC_JP, SQL_ASCII = (Encoding.of(name) for name in ("WIN1252", "EUC_JP", "SQL_ASCII"))


def test_invalid_byte_is_refused_or_marked() -> None:
    assert WIN1252.decode(b"caf\xe9 \x80") == "café €"
    with pytest.raises(UnicodeDecodeError):
        WIN1252.decode(b"b\x81")
    assert WIN1252.shown(b"\xe9 b\x81") == "é b\ufffd81"
    assert marked(WIN1252.shown(b"b\x81"))
    assert not marked("caf\ufffd")


@pytest.mark.parametrize(("raw", "text"), [
    (b"\xa1\xc1", "～"), (b"\xad\xa1", "①"), (b"\xa2\xcc", "￢"), (b"\x8f\xf4\xa1", "Ⅲ"), (b"\xc6\xfc\xcb\xdc", "日本"),
])  # fmt: skip
def test_japanese_is_read_as_the_server_converts_it(raw: bytes, text: str) -> None:
    assert EUC_JP.decode(b"a" + raw + b"b" + raw) == f"a{text}b{text}"
    assert EUC_JP.decode(EUC_JP.encode(text)) == text


def test_name_that_the_encoding_cannot_hold_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'日本' does not exist in the source's encoding, WIN1252"):
        WIN1252.encode("日本")


def test_encoding_that_python_lacks_is_received_as_utf8() -> None:
    assert Encoding.of("EUC_TW") == Encoding.of("MULE_INTERNAL") == Encoding.of(None) == UTF8
    assert SQL_ASCII.name == "SQL_ASCII"
    assert SQL_ASCII.title == "UTF-8"


@given(st.binary(max_size=40), st.sampled_from([WIN1252, EUC_JP, SQL_ASCII, UTF8]))
def test_name_read_as_utf8_is_read_again_in_its_own_encoding(raw: bytes, encoding: Encoding) -> None:
    assert encoding.reread(UTF8.shown(raw)) == encoding.shown(raw)


@given(st.binary(max_size=40), st.sampled_from([WIN1252, EUC_JP, UTF8]))
def test_text_is_marked_if_and_only_if_decoding_refuses_it(raw: bytes, encoding: Encoding) -> None:
    try:
        text = encoding.decode(raw)
    except UnicodeDecodeError:
        assert marked(encoding.shown(raw))
    else:
        assert encoding.shown(raw) == text
