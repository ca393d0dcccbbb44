"""Names and folders of tables, locations of files, texts in the encoding of the source, and patterns for the prefixes
of logical messages."""

from __future__ import annotations

import pickle
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.encoding import UTF8, Encoding, marked
from pgcdc_assets.core.layout import LOCAL, Location
from pgcdc_assets.core.names import TableName, decoded, encoded, nearest
from pgcdc_assets.core.settingvalues import PrefixPatterns
from pgcdc_assets.errors import UsageError

_NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(_NAMES, _NAMES)
def test_table_name_is_unchanged_after_a_round_trip_as_sql(schema: str, name: str) -> None:
    assert TableName.parse(str(TableName(schema, name))) == TableName(schema, name)


@given(_NAMES)
def test_table_name_is_unchanged_after_a_round_trip_as_folder(name: str) -> None:
    folder = encoded(name)
    assert decoded(folder) == name
    assert "/" not in folder
    assert folder not in (".", "..")
    assert not folder.startswith("_pgcdc")


@given(st.tuples(_NAMES, _NAMES), st.tuples(_NAMES, _NAMES))
def test_folders_of_different_tables_never_collide(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (TableName(*one).folder == TableName(*other).folder) == (one == other)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("t", TableName("public", "t")),
        ("Shop.Orders", TableName("shop", "orders")),
        ('"Odd Schema"."Select"', TableName("Odd Schema", "Select")),
        ('"a.b"', TableName("public", "a.b")),
        ('"say ""hi"""', TableName("public", 'say "hi"')),
    ],
)
def test_identifiers_are_parsed_as_postgres_parses_them(text: str, name: TableName) -> None:
    assert TableName.parse(text) == name


@pytest.mark.parametrize("text", ["", ".", "a.", "a.b.c", '"open', "1a", 'a"b"', "a b"])
def test_text_that_is_not_a_table_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        TableName.parse(text)


def test_folder_of_a_schema_is_never_a_folder_that_pgcdc_itself_uses() -> None:
    schema, name = TableName("_pgcdc", "..").folder.split("/")
    assert schema != "_pgcdc"
    assert (decoded(schema), decoded(name)) == ("_pgcdc", "..")
    assert name != ".."


@given(_NAMES, _NAMES)
def test_table_name_in_advice_is_quoted_for_the_shell(schema: str, name: str) -> None:
    table = TableName(schema, name)
    assert shlex.split(f"pgcdc snapshot {table.shell}") == ["pgcdc", "snapshot", str(table)]


def test_table_with_the_most_similar_name_is_found_in_any_schema() -> None:
    tables = [TableName("shop", "orders"), TableName("public", "order_lines"), TableName("public", "customers")]
    assert nearest("orderz", tables) == TableName("shop", "orders")
    assert nearest("xyz", tables) is None


@pytest.mark.parametrize(
    ("name", "folder"),
    [(".", "~2E"), ("..", "~2E."), ("...", "..."), ("_delta_log", "~5Fdelta_log"), ("_pgcdc_x", "~5Fpgcdc_x"),
     ("_DELTA_LOG", "_DELTA_LOG"), ("a/b", "a~2Fb")],
)  # fmt: skip
def test_folder_name_with_a_special_meaning_is_escaped(name: str, folder: str) -> None:
    assert encoded(name) == folder


def test_name_is_quoted_in_sql_only_if_necessary() -> None:
    assert str(TableName("shop", "orders")) == "shop.orders"
    assert str(TableName("Shop", 'a"b')) == '"Shop"."a""b"'


# Parsing, joining, splitting and comparing instances of :class:`Location` ---------------------------


def test_a_location_makes_a_path_absolute_and_keeps_a_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Location.of("lake").text == str(tmp_path / "lake")
    assert Location.of(Path("lake//./")).text == str(tmp_path / "lake")
    assert Location.of("lake/../other").text == f"{tmp_path}/lake/../other", "lake may be a link"
    assert Location.of("memory://store/lake/").text == "memory://store/lake"
    assert Location.of(Location.of("lake")) == Location.of("lake")


@pytest.mark.parametrize("root", ["/lake", "memory://store/lake"])
def test_locations_are_joined_and_split(root: str) -> None:
    lake = Location.of(root)
    file = lake / "public/t" / "part"
    assert str(file) == f"{root}/public/t/part"
    assert (file.name, file.parent, file.with_name("other")) == ("part", lake / "public/t", lake / "public/t/other")
    assert pickle.loads(pickle.dumps(file)) == file
    assert {file: 1}[lake / "public/t/part"] == 1


def test_a_location_has_the_scheme_of_its_url_or_the_scheme_of_local_files() -> None:
    assert Location.of("/lake").scheme == LOCAL
    assert Location.of("s3://bucket/key").scheme == "s3"


def test_parent_folders_are_listed_up_to_the_folder_that_contains_the_lake() -> None:
    lake = Location.of("/srv/lake")
    assert (lake / "public/t").up_to(lake) == [lake / "public/t", lake / "public", lake, Location("/srv")]
    assert Location("/lake").up_to(Location("/lake")) == [Location("/lake"), Location("/")]


def test_local_path_is_given_to_other_programs_as_a_uri() -> None:
    assert Location("/srv/a lake").uri == "file:///srv/a%20lake"
    assert Location("s3://bucket/key").uri == "s3://bucket/key"


# Decoding text from a server's encoding -------------------------------------------------------------

WIN1252, EUC_JP, SQL_ASCII = (Encoding.of(name) for name in ("WIN1252", "EUC_JP", "SQL_ASCII"))


def test_a_byte_that_cannot_be_decoded_is_an_error_in_values_and_is_marked_in_names() -> None:
    assert WIN1252.decode(b"caf\xe9 \x80") == "café €"
    with pytest.raises(UnicodeDecodeError):
        WIN1252.decode(b"b\x81")
    assert WIN1252.shown(b"\xe9 b\x81") == "é b\ufffd81"
    assert marked(WIN1252.shown(b"b\x81"))
    assert not marked("caf\ufffd")


@pytest.mark.parametrize(("raw", "text"), [
    (b"\xa1\xc1", "～"), (b"\xad\xa1", "①"), (b"\xa2\xcc", "￢"), (b"\x8f\xf4\xa1", "Ⅲ"), (b"\xc6\xfc\xcb\xdc", "日本"),
])  # fmt: skip
def test_euc_jp_text_is_decoded_as_postgresql_converts_it(raw: bytes, text: str) -> None:
    assert EUC_JP.decode(b"a" + raw + b"b" + raw) == f"a{text}b{text}"
    assert EUC_JP.decode(EUC_JP.encode(text)) == text


def test_name_with_a_character_that_the_encoding_lacks_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'日本' does not exist in the source's encoding, WIN1252"):
        WIN1252.encode("日本")


def test_text_in_an_encoding_that_python_lacks_is_received_as_utf8() -> None:
    assert Encoding.of("EUC_TW") == Encoding.of("MULE_INTERNAL") == Encoding.of(None) == UTF8
    assert SQL_ASCII.name == "SQL_ASCII"
    assert SQL_ASCII.title == "UTF-8"


@given(st.binary(max_size=40), st.sampled_from([WIN1252, EUC_JP, SQL_ASCII, UTF8]))
def test_name_decoded_as_utf8_can_be_decoded_again_in_the_sources_encoding(raw: bytes, encoding: Encoding) -> None:
    assert encoding.reread(UTF8.shown(raw)) == encoding.shown(raw)


@given(st.binary(max_size=40), st.sampled_from([WIN1252, EUC_JP, UTF8]))
def test_shown_text_is_the_decoded_text_and_is_marked_if_decoding_fails(raw: bytes, encoding: Encoding) -> None:
    try:
        text = encoding.decode(raw)
    except UnicodeDecodeError:
        assert marked(encoding.shown(raw))
    else:
        assert encoding.shown(raw) == text


@pytest.mark.parametrize(
    ("patterns", "prefix", "chosen"),
    [
        ([], "outbox", False),
        (["outbox"], "outbox", True),
        (["outbox"], "outbox.orders", False),
        (["outbox"], "an outbox", False),
        (["outbox.*"], "outbox.orders", True),
        (["outbox.*"], "outbox.", True),
        (["outbox.*"], "outboxes", False),
        (["out?"], "outs", True),
        (["out?"], "outer", False),
        (["*"], "two\nlines", True),
        (["*", "-debug.*"], "debug.x", False),
        (["*", "-debug.*"], "debug", True),
        (["-debug.*", "app", "*x"], "box", True),
        (['"a*b"'], "a*b", True),
        (['"a*b"'], "axb", False),
        (['"a""b"'], 'a"b', True),
        (['-"a*b"', "a*"], "a*b", False),
    ],
)
def test_message_prefix_is_chosen_if_it_is_included_and_not_excluded(
    patterns: list[str], prefix: str, chosen: bool
) -> None:
    assert PrefixPatterns.parse(patterns).match(prefix) is chosen


@pytest.mark.parametrize("pattern", ["", " app", "app ", 'a"b', "a\0b", "-", "- app", '""'])
def test_text_that_is_not_a_pattern_for_message_prefixes_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=f"^{pattern!r} is not a pattern".replace("\\", "\\\\")):
        PrefixPatterns.parse([pattern, "*"])


def test_patterns_that_only_exclude_message_prefixes_are_refused() -> None:
    with pytest.raises(ValueError, match="excludes prefixes and includes none"):
        PrefixPatterns.parse(["-debug.*"])
