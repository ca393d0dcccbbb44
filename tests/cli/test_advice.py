"""Each case: a command fails and prints advice. After the advice was followed, the command succeeds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from psycopg import sql

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from tests.advised import advice
from tests.cli.conftest import Shell
from tests.projectfiles import CATALOG_FILE

OTHERS: list[ReplicationConnection] = []


def run_sql(shell: Shell, text: str) -> None:
    with shell.database.connect() as conn:
        conn.execute(text.encode())


def slot_of(shell: Shell) -> str:
    return f"s_{shell.database.name}"


def _log_ahead(shell: Shell) -> None:
    """Makes the state after the source was restored to an earlier time: the change log is ahead of the source."""
    shell.pgcdc("setup")
    saved = load_catalog(CATALOG_FILE)
    assert saved is not None
    ChangeLog(Settings.load().layout).create(saved.identity, Lsn(1 << 60), 1)


def _new_lake(shell: Shell, _: str) -> None:
    shell.pgcdc("teardown", "--lake", "--yes")
    shell.pgcdc("setup")


def _drop_as_advised(shell: Shell, said: str) -> None:
    statement = re.search(r"SELECT pg_drop_replication_slot\('\w+'\)", said)
    assert statement is not None
    run_sql(shell, statement[0])


def _other_slot(shell: Shell, _: str) -> None:
    shell.set(SLOT=f"other_{shell.database.name}")


def _set_up_then(more: Callable[[Shell], object]) -> Callable[[Shell], None]:
    def prepare(shell: Shell) -> None:
        shell.pgcdc("setup")
        more(shell)

    return prepare


def _emptied(shell: Shell) -> None:
    shell.pgcdc("pause", "apply")
    run_sql(shell, f"ALTER PUBLICATION {slot_of(shell)} DROP TABLE a, b")


def _held(shell: Shell) -> None:
    other = ReplicationConnection.open(shell.database.conninfo, application_name="somebody")
    other.start(slot_of(shell), ZERO, [slot_of(shell)])
    OTHERS.append(other)


def _terminate_as_advised(shell: Shell, said: str) -> None:
    statement = re.search(r"SELECT pg_terminate_backend\((\d+)\)", said)
    assert statement is not None
    # Waits up to 10 s until the session has ended, so that the slot is free.
    run_sql(shell, f"SELECT pg_terminate_backend({statement[1]}, 10000)")
    OTHERS.pop().close()


def _physical(shell: Shell) -> None:
    with shell.database.connect() as conn:
        conn.execute("SELECT pg_create_physical_replication_slot(%s)", [slot_of(shell)])


def _publication_by_hand(shell: Shell) -> None:
    """Creates a publication without `pgcdc setup`, and a physical slot. Both have the name of the project's slot."""
    run_sql(shell, sql.SQL("CREATE PUBLICATION {} FOR TABLE a").format(sql.Identifier(slot_of(shell))).as_string(None))
    _physical(shell)


@dataclass(frozen=True)
class Case:
    advice: str
    """The text of the advice in the source code of pgcdc, with ``{}`` in place of each value."""
    prepare: Callable[[Shell], object]
    command: str
    code: int
    said: str
    follow: Callable[[Shell, str], object]


SETUP = "run `pgcdc setup`"
CASES = (
    Case(SETUP, lambda s: None, "status", 1, SETUP, lambda s, _: s.pgcdc("setup")),
    Case("run `pgcdc teardown --lake`, then `pgcdc setup` and `pgcdc sync`", _log_ahead, "status", 1,
         "run `pgcdc teardown --lake`", _new_lake),
    Case("if no table was changed since then, create the publication yourself; otherwise run SELECT "
         "pg_drop_replication_slot('{}') and `pgcdc setup`; the next sync then copies all tables again",
         lambda s: run_sql(s, f"SELECT pg_create_logical_replication_slot('{slot_of(s)}', 'pgoutput')"), "setup", 1,
         "create the publication yourself", _drop_as_advised),
    Case("choose another name in the setting `slot`", _publication_by_hand, "setup", 1,
         "choose another name in the setting `slot`", _other_slot),
    Case("set `two_phase` to {}, or choose another name in the setting `slot`",
         _set_up_then(lambda s: s.set(TWO_PHASE="true")), "status", 1, "set `two_phase` to false",
         lambda s, _: s.set(TWO_PHASE="false")),
    Case("set `two_phase` to {}, or choose another name in the setting `slot`",
         _set_up_then(lambda s: s.set(TWO_PHASE="true")), "setup", 1, "set `two_phase` to false",
         lambda s, _: s.set(TWO_PHASE="false")),
    Case("create one", lambda s: run_sql(s, "DROP TABLE a, b"), "setup", 1, "create one",
         lambda s, _: run_sql(s, "CREATE TABLE c (id int PRIMARY KEY)")),
    Case("did you mean {}?", lambda s: Path("pgcdc.yaml").write_text('tables: ["public.aa"]\n'), "setup", 1,
         "did you mean public.a?", lambda s, _: Path("pgcdc.yaml").write_text('tables: ["public.a"]\n')),
    Case("did you mean `{}`?", lambda s: Path("pgcdc.yaml").write_text("lakes: there\n"), "setup", 2,
         "did you mean `lake`?", lambda s, _: Path("pgcdc.yaml").write_text("lake: there\n")),
    Case("add the tables back, or run `pgcdc setup`", _set_up_then(_emptied), "sync", 1,
         "add the tables back, or run `pgcdc setup`", lambda s, _: s.pgcdc("setup")),
    Case("stop that process, or SELECT pg_terminate_backend({}) on the source", _set_up_then(_held), "status", 1,
         "pg_terminate_backend(", _terminate_as_advised),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.advice[:40])
def test_a_command_succeeds_after_its_advice_was_followed(case: Case, shell: Shell) -> None:
    case.prepare(shell)
    said = shell.pgcdc(*case.command.split(), expect=case.code)
    assert case.said in said
    case.follow(shell, said)
    assert case.said not in shell.pgcdc(*case.command.split())
    _drop_any_physical(shell)


def _drop_any_physical(shell: Shell) -> None:
    """A physical slot belongs to no database, so dropping the database would leave it on the server."""
    with shell.database.connect() as conn:
        conn.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s AND "
                     "slot_type = 'physical'", [slot_of(shell)])  # fmt: skip


@pytest.mark.long
def test_setup_does_not_warn_about_a_table_whose_replica_identity_was_set_as_advised(shell: Shell) -> None:
    run_sql(shell, "CREATE TABLE keyless (v int)")
    said = shell.pgcdc("setup")
    assert "give it a primary key, or ALTER TABLE public.keyless REPLICA IDENTITY FULL; then run `pgcdc setup`" in said
    run_sql(shell, "ALTER TABLE public.keyless REPLICA IDENTITY FULL")
    assert "are not replicated" not in shell.pgcdc("setup")


def test_partitions_without_a_shared_key_need_replica_identity_full_on_each(shell: Shell) -> None:
    run_sql(
        shell, "CREATE TABLE parts (a int NOT NULL, b int NOT NULL) PARTITION BY LIST (a);"
        "CREATE TABLE parts_1 PARTITION OF parts (PRIMARY KEY (a)) FOR VALUES IN (1);"
        "CREATE TABLE parts_2 PARTITION OF parts (PRIMARY KEY (b)) FOR VALUES IN (2)",
    )  # fmt: skip
    said = shell.pgcdc("setup")
    assert (
        "table public.parts: no key that all its partitions share: its updates and deletes are not replicated" in said
    )
    assert "or set REPLICA IDENTITY FULL on each of its partitions; then run `pgcdc setup`" in said
    run_sql(shell, "ALTER TABLE parts_1 REPLICA IDENTITY FULL; ALTER TABLE parts_2 REPLICA IDENTITY FULL")
    assert "are not replicated" not in shell.pgcdc("setup")


def test_the_advice_of_each_case_is_in_the_source_code() -> None:
    assert {case.advice for case in CASES} <= advice()
