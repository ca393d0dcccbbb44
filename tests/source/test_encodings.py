"""pgcdc's decoding of every server encoding, compared with the server's own conversion to UTF8."""

from __future__ import annotations

from itertools import product

from pgcdc_assets.core.encoding import _BY_NAME, Encoding
from tests.fix_postgres import Database

_HIGH = range(0xA1, 0xFF)
_TRIED = """
CREATE FUNCTION converted(raw bytea, encoding text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN RETURN convert_from(raw, encoding); EXCEPTION WHEN untranslatable_character OR character_not_in_repertoire
THEN RETURN NULL; END $$
"""
_VALID = """
CREATE FUNCTION valid(raw bytea, encoding text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN PERFORM length(raw, encoding); RETURN true; EXCEPTION WHEN character_not_in_repertoire THEN RETURN false; END $$
"""


def _sequences(name: str) -> list[bytes]:
    """Every possible character of the encoding, and some impossible ones."""
    single = [bytes([one]) for one in range(0x80, 0x100)]
    if not name.startswith("EUC"):
        return single
    double = [bytes(pair) for pair in product(_HIGH, _HIGH)]
    half = [bytes([0x8E, one]) for one in range(0xA0, 0x100)]
    return single + double + half + [b"\x8f" + pair for pair in double]


def test_every_character_is_decoded_as_the_server_converts_it(database: Database) -> None:
    with database.connect() as conn:
        conn.execute(_TRIED)
        conn.execute(_VALID)
        for name in sorted(_BY_NAME.keys() - {"UTF8", "SQL_ASCII"}):
            encoding = Encoding.of(name)
            assert encoding.name == name
            found = conn.execute(
                "SELECT raw, converted(raw, %(name)s) FROM unnest(%(raw)s::bytea[]) AS raw WHERE valid(raw, %(name)s)",
                {"name": name, "raw": _sequences(name)},
            ).fetchall()
            assert len(found) >= 0x60
            for of_server, text in found:
                try:
                    ours = encoding.decode(bytes(of_server))
                except UnicodeDecodeError:
                    ours = None
                # Python also decodes characters of older Japanese character sets that the server cannot convert to
                # UTF8.
                assert ours == text or (text is None and name in ("EUC_JP", "EUC_JIS_2004")), (name, bytes(of_server))
                if text is not None:
                    assert encoding.decode(encoding.encode(text)) == text
