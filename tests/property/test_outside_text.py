"""Bytes and texts from users and from the source: each parser returns a value, or raises an error of pgcdc."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from struct import pack

import pyarrow as pa
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.encoding import UTF8
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.settingvalues import PrefixPatterns
from pgcdc_assets.defs.demand import Cursor
from pgcdc_assets.errors import PgcdcError, ProtocolError, SettingsError
from pgcdc_assets.feed.messages import _decoded
from pgcdc_assets.log.announcements import Announcement
from pgcdc_assets.log.segment import LOG_SCHEMA
from pgcdc_assets.protocol.decode import decode, decode_any
from pgcdc_assets.protocol.frames import keepalive, keepalive_frame
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.tables import TablePatterns
from pgcdc_assets.store.lease import ProcessName
from tests.property.damage import damaged, damaged_json, otherwise
from tests.protocol.examples import EXAMPLES

FEW = settings(max_examples=60, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=1000)

MESSAGES = [payload for payload, _ in EXAMPLES]
LETTERS = st.sampled_from([bytes([letter]) for letter in range(256)])
TEXTS: dict[str, tuple[Callable[[str], object], str]] = {
    "LSN": (Lsn.parse, "16/B374D848"),
    "range": (LsnRange.parse, "0/10..0/20"),
    "partition key": (LsnRange.parse, "000000000010-000000000020"),
    "table": (TableName.parse, 'public."odd ""name"'),
    "prefix pattern": (lambda text: PrefixPatterns.parse([text]), 'outbox.*'),
    "table pattern": (lambda text: TablePatterns.parse([text]), '-public."a*"'),
    "process": (ProcessName.parse, str(ProcessName.own())),
    "cursor": (Cursor.parse, str(Cursor())),
    "announcement": (Announcement.from_line, '{"count": 1, "bytes": 2, "xid": 3, "lsn": 4, "since": "2026-01-01"}\n'),
}  # fmt: skip
USAGE = (PgcdcError, ValueError)
"""The errors that a parser of one text may raise. The parser's caller adds the name of the setting, option or file."""
SETTINGS = b"""\
# A project.
source: host=db.example.org dbname=shop user=replicator
lake: s3://bucket/shop
tables: ["public.*", "-public.audit_*"]
messages: [outbox.*]
spark: {master: "local[4]", spark.driver.memory: 4g}
retention: 7 days
range_bytes: 256MiB
two_phase: false
"""


def messages(data: st.DataObject) -> bytes:
    if data.draw(st.booleans()):
        return data.draw(damaged(data.draw(st.sampled_from(MESSAGES))))
    return data.draw(LETTERS) + data.draw(st.binary(max_size=40))


@FEW
@given(prefix=st.binary(max_size=12).filter(lambda text: b"\0" not in text), content=st.binary(max_size=12))
def test_a_logical_message_of_any_bytes_is_a_row_of_the_feed(prefix: bytes, content: bytes) -> None:
    """Any role that can connect may emit messages, and a source with SQL_ASCII does not check text."""
    payload = b"M\1" + pack("!Q", 16) + prefix + b"\0" + pack("!I", len(content)) + content
    rows = {"payload": payload, "commit_lsn": 5, "tx_ordinal": 0, "xid": 7, "commit_ts": None, "origin": None}
    types = {field.name: field.type for field in LOG_SCHEMA}
    given_ = pa.table({name: pa.array([value], types[name]) for name, value in rows.items()})
    (found,) = _decoded(given_, UTF8).to_pylist()
    assert (found["prefix"], found["content"]) == (UTF8.shown(prefix), content)


def refusal(kind: type[Exception] | tuple[type[Exception], ...], read: Callable[[], object]) -> Exception | None:
    """Calls ``read``. Returns the error if ``read`` raises an error of the type ``kind``, otherwise None."""
    try:
        read()
    except kind as error:
        return error
    return None


def check_message(data: st.DataObject) -> None:
    payload, parallel = messages(data), data.draw(st.booleans())
    for read in (decode, partial(decode_any, parallel=parallel)):
        error = refusal(ProtocolError, lambda read=read: read(payload, Lsn(77)))  # type: ignore[misc]
        assert error is None or (isinstance(error, ProtocolError) and error.lsn == 77)


@FEW
@given(data=st.data())
def test_damaged_messages_are_decoded_or_refused_with_an_error_that_has_their_lsn(data: st.DataObject) -> None:
    check_message(data)


@FEW
@given(frame=damaged(keepalive_frame(0x16B374D848)))
def test_a_damaged_keepalive_is_read_or_refused_with_a_protocol_error(frame: bytes) -> None:
    refusal(ProtocolError, lambda: keepalive(frame))


@FEW
@given(data=st.data())
def test_a_damaged_text_is_parsed_or_refused_with_an_expected_error(data: st.DataObject) -> None:
    check_text(data.draw(st.sampled_from(sorted(TEXTS))), data)


def check_text(name: str, data: st.DataObject) -> None:
    parse, text = TEXTS[name]
    given_ = data.draw(damaged_json(text.encode()) if text.startswith("{") else damaged(text.encode()))
    refusal(USAGE, lambda: parse(given_.decode("utf-8", "surrogateescape")))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("settings")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith("PGCDC_")]:
            patch.delenv(name)
        yield folder / "pgcdc.yaml"


def check_settings(project: Path, data: st.DataObject) -> None:
    content = data.draw(damaged(SETTINGS))
    if data.draw(st.booleans()):
        content = yaml.safe_dump(data.draw(otherwise(yaml.safe_load(SETTINGS)))).encode()
    settings_of(project, content)


def settings_of(project: Path, content: bytes) -> Exception | None:
    project.write_bytes(content)
    error = refusal(SettingsError, Settings.load)
    assert error is None or "\n" not in str(error)
    return error


@pytest.mark.parametrize("content", [b"retention: 2026-02-30", b'source: "\\ud800"'], ids=["no date", "no text"])
def test_a_settings_file_that_its_parser_cannot_read_gives_a_one_line_error(project: Path, content: bytes) -> None:
    assert settings_of(project, content)


@pytest.mark.parametrize("line", ["5", "{}", '{"since": 5, "lsn": 4}', "[" * 100_000], ids=["5", "{}", "since", "deep"])
def test_an_announcement_with_an_unknown_form_is_ignored(line: str) -> None:
    assert Announcement.from_line(f"{line}\n") is None


@FEW
@given(data=st.data())
def test_a_settings_file_is_read_or_refused_with_a_one_line_error(project: Path, data: st.DataObject) -> None:
    check_settings(project, data)


@pytest.mark.long
@MANY
@given(data=st.data())
def test_many_damaged_messages_settings_and_texts_are_read_or_refused(project: Path, data: st.DataObject) -> None:
    check_message(data)
    check_settings(project, data)
    check_text(data.draw(st.sampled_from(sorted(TEXTS))), data)
