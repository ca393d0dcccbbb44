"""The connection to the source: setup warns if a third party on the network could read the rows or impersonate the
source."""

from __future__ import annotations

import pytest

from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.setup import findings
from pgcdc_assets.source.setup.findings import exposed
from pgcdc_assets.source.setup.setup import check_source
from tests.deadpath import DeadPath
from tests.fix_postgres import Database

FAR = ("db.example.org", "203.0.113.7")
OPEN = "without encryption"
ANOTHER = "does not check that it is the right server"


@pytest.mark.parametrize(
    ("address", "sslmode", "tls", "gss", "said"),
    [
        ("", "prefer", False, False, None),
        ("127.0.0.1", "disable", False, False, None),
        ("127.8.0.1", "prefer", False, False, None),
        ("::1", "prefer", False, False, None),
        ("::ffff:127.0.0.1", "prefer", False, False, None),
        ("10.0.0.7", "prefer", False, False, OPEN),
        ("203.0.113.7", "disable", False, False, OPEN),
        ("fe80::1%eth0", "prefer", False, False, OPEN),
        ("203.0.113.7", "prefer", True, False, ANOTHER),
        ("203.0.113.7", "require", True, False, ANOTHER),
        ("203.0.113.7", "verify-ca", True, False, ANOTHER),
        ("203.0.113.7", "verify-full", True, False, None),
        ("203.0.113.7", "prefer", False, True, None),
    ],
)
def test_a_remote_source_must_be_encrypted_and_verified(
    address: str, sslmode: str, tls: bool, gss: bool, said: str | None
) -> None:
    found = exposed(FAR[0], address, sslmode, tls=tls, gss=gss)
    assert (found is None) == (said is None)
    assert said is None or (found is not None and said in found and FAR[0] in found)


def test_setup_does_not_warn_about_a_source_on_this_machine(database: Database) -> None:
    with connect(database.conninfo) as conn:
        found = check_source(conn, Settings(source=database.conninfo))
        assert not [finding for finding in found if "is reached" in finding.what]


def test_setup_warns_about_a_remote_source_without_encryption(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "_loopback", lambda address: False)
    with DeadPath(database) as path, connect(path.conninfo) as conn:
        assert conn.info.hostaddr == "127.0.0.1"
        (found,) = [one for one in check_source(conn, Settings(source=path.conninfo)) if "is reached" in one.what]
    assert (found.severity, found.thing) == ("warning", "source")
    assert OPEN in found.what
    assert "sslmode=verify-full" in found.do
