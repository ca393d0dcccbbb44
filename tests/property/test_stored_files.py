"""Damaged files of a project or lake: each file is read as a value, or refused with an error of pgcdc."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgcdc_assets.checks.report import TableReport, keep_proofs, read_proofs
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.checkpoint import make_checkpoint
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.delta.recovery import recover
from pgcdc_assets.delta.vectors import read_vector
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow import lock, outcomes
from pgcdc_assets.flow.meter import RunCounts, read_counts
from pgcdc_assets.flow.requests import (
    VerifyRequests,
    follow_until,
    operator_requests,
    place_verify_request,
    verify_request,
)
from pgcdc_assets.log.commit import LogWriter
from pgcdc_assets.log.commitfacts import CommitFacts
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.relations import Overlay
from pgcdc_assets.log.rows import rows_in_progress
from pgcdc_assets.log.spill import PREPARED, SPILL, PreparedFolder, SpillFolder
from pgcdc_assets.log.transactions import OpenBlock, PreparedKey, PreparedTransaction
from pgcdc_assets.mirror.delta.mirror import Mirrors
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates, _row
from pgcdc_assets.project import load_catalog, save_catalog
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import Relation
from pgcdc_assets.store import storage
from pgcdc_assets.store.chainlease import Chain, Link
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.record import TableState
from tests.defs.catalogs import catalog_of
from tests.delta.rows import OWNER, SCHEMA, Rows
from tests.deltatables import opened, publish_at
from tests.history.mirror import make
from tests.log.streams import START, WHO, frame, frames_of, insert, relation, run_of, writer_of
from tests.property.damage import Content, damaged, damaged_json, damaged_parquet

CATALOG = catalog_of(("public", "a"), ("public", "b"))
A = TableName("public", "a")
ALL = LsnRange(Lsn(0), Lsn(1 << 60))
FEW = settings(max_examples=120, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=1000)


@dataclass(frozen=True, repr=False)
class Stored:
    """A file of a project or lake, and a function that calls all readers of this file."""

    path: Path
    content: bytes
    read: Callable[[], object]


def newest_commits(log: Path) -> list[Path]:
    return sorted(log.glob("*.json"))


KEY = PreparedKey(7, "g", Lsn(240))


def keep_prepared(log: Location) -> None:
    """Stores a prepared transaction in the folder next to the change log, and marks that its commit has begun."""
    folder, payload = PreparedFolder(log), relation(1, "t1")
    of = decode(payload)
    assert isinstance(of, Relation)
    overlay = Overlay()
    overlay.see(of, payload, 0)
    rows = rows_in_progress(run_of([frame(insert(1, b"x"))] * 3, 1), np.array([7, 8, 9]), OpenBlock(7), overlay)
    prepared = PreparedTransaction(KEY, 5, frozenset({8}), overlay, 3, 300, None, 2)
    folder.keep(prepared, SpillFolder(log, folder).spill(rows))
    folder.committing({KEY: 400})


def read_prepared(log: Location) -> None:
    """Calls all readers of a prepared transaction's manifest and commit mark. Recovery gets a copy, because it deletes
    files."""
    folder = PreparedFolder(log)
    folder.pending()
    for spilled in folder.taken(KEY, storage.scratch(log / SPILL)):
        spilled.at(CommitFacts(400, 5, (8,), {0: 77}))
        spilled.segment.draft.discard()
    with copied(log / PREPARED) as beside:
        PreparedFolder(beside).recover(Lsn(250))
        PreparedFolder(beside).drop([KEY])


@contextmanager
def copied(folder: Location) -> Iterator[Location]:
    """A copy of the folder with the same name in a temporary folder."""
    beside = Path(f"{folder.parent}_beside")
    shutil.copytree(str(folder), beside / folder.name)
    try:
        yield Location.of(beside)
    finally:
        shutil.rmtree(beside)


def make_table(root: Path) -> Path:
    """Makes a mirror with deletion vectors. The commits of the mirror's oldest versions are deleted, so that only a
    checkpoint describes these versions."""
    mirror = Mirrors(Layout.of(root), OWNER).open(A)
    make(mirror, SCHEMA, {})
    table = Rows(path_of(mirror.path))
    for number in range(4):
        table.change([number, 10 + number], {9 + number})
        if number == 2:
            make_checkpoint(mirror.path, opened(mirror.path).number)
    log = path_of(mirror.path) / "_delta_log"
    for commit in newest_commits(log)[:3]:
        commit.unlink()
    return path_of(mirror.path)


def read_table(folder: Path) -> None:
    log = DeltaLog(Location.of(folder))
    version = log.newest()
    assert version is not None
    version.schema, version.configuration, version.features, log.at(version.number)
    for file in version.files:
        if file.action.get("deletionVector"):
            read_vector(version.folder, file.action["deletionVector"])
    with copied(Location.of(folder)) as beside:
        recover(beside / folder.name, version.number)
        recover(beside / folder.name)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Stored]]:
    """The files of a project with a lake, one file of each kind."""
    root = tmp_path_factory.mktemp("project")
    layout = Layout.of(root / "lake")
    log = ChangeLog(layout)
    log.create(WHO, START, 3)
    writer, _ = writer_of(log)
    writer.commit(frames_of(200), [], Lsn(250))
    publish_at(ConsistentPoints(layout), 250, {A: 1})
    TableStates(layout).set(CATALOG.tables[0], TableState.STREAMING, Lsn(250))
    storage.replace(layout.counts, RunCounts(datetime.now(UTC)).to_json().encode())
    keep_proofs(layout, [TableReport(A, lsn=Lsn(5))])
    with outcomes.recorded(layout, outcomes.OperationKind.SYNC, "sync", lambda text: None):
        pass
    follow_until(layout, Lsn(300))
    save_catalog(CATALOG, root / "catalog.json")
    chain = Location.of(root / "chain")
    (root / "chain").mkdir()
    (root / "chain" / f"{1:020}").write_bytes(Link(1).to_bytes())

    def read_log() -> None:
        found = ChangeLog(layout)
        found.identity, found.began, found.position(), found.timeline
        found.batches(Lsn(0)), found.segments(ALL), found.shapes(ALL)
        found.verify(ALL)
        LogWriter(layout.change_log, WHO)

    def read_points() -> object:
        points = ConsistentPoints(layout)
        return points.newest(), points.at(Lsn(250)), points.oldest(), points.listing(A), points.versions([A])

    def logs(folder: Location) -> Path:
        return Path(str(folder)) / "_delta_log"

    keep_prepared(layout.change_log)
    prepared = Path(str(layout.change_log / PREPARED))
    table = make_table(root / "lake")

    found: dict[str, tuple[Path, Callable[[], object]]] = {
        "saved catalog": (root / "catalog.json", lambda: load_catalog(root / "catalog.json")),
        "outcomes": (Path(str(layout.outcomes)), lambda: outcomes.read(layout)),
        "counts": (Path(str(layout.counts)), lambda: read_counts(layout)),
        "proofs": (Path(str(layout.proofs)), lambda: read_proofs(layout)),
        "endpos": (Path(str(layout.endpos)), lambda: operator_requests(layout)),
        "lease": (root / "chain" / f"{1:020}", lambda: Chain(chain).look()),
        "change log": (newest_commits(logs(layout.change_log))[-1], read_log),
        "change log's first commit": (newest_commits(logs(layout.change_log))[0], read_log),
        "points": (newest_commits(logs(layout.consistent_points))[-1], read_points),
        "points' first commit": (newest_commits(logs(layout.consistent_points))[0], read_points),
        "states": (newest_commits(logs(layout.table_states))[-1], lambda: TableStates(layout).all()),
        "prepared": (next(prepared.glob("*.json")), lambda: read_prepared(layout.change_log)),
        "prepared's commit": (next(prepared.glob("*.committing")), lambda: read_prepared(layout.change_log)),
        "checkpoint": (next((table / "_delta_log").glob("*.parquet")), lambda: read_table(table)),
        "hold": (Path(str(layout.hold)), lambda: (verify_request(layout), VerifyRequests(layout).current())),
        "lock": (Path(str(layout.lock)), lambda: lock.holder(layout)),
    }
    with place_verify_request(layout), lock.lake_lock(layout, "sync"):
        yield {name: Stored(path, Content(path.read_bytes()), read) for name, (path, read) in found.items()}


NAMES = ["saved catalog", "outcomes", "counts", "proofs", "endpos", "lease", "change log",
         "change log's first commit", "points", "points' first commit", "states", "prepared", "prepared's commit",
         "checkpoint", "hold", "lock"]  # fmt: skip
PROPERTIES = {"pgcdc.format": "1", "pgcdc.system_identifier": "7", "pgcdc.database": "db", "pgcdc.database_oid": "0",
              "pgcdc.slot": "slot", "pgcdc.start_lsn": "0/64"}  # fmt: skip
"""The change log's properties that pgcdc reads."""
TEXTS = {"endpos", "prepared's commit", "hold", "lock"}


def check(files: dict[str, Stored], data: st.DataObject, name: str) -> None:
    stored = files[name]
    damage = damaged if name in TEXTS else damaged_parquet if name == "checkpoint" else damaged_json
    refusal_of(stored, data.draw(damage(stored.content)))


def refusal_of(stored: Stored, content: bytes) -> PgcdcError | None:
    """Replaces the file's content for a moment, and reads the file. Returns the error if the content is refused."""
    stored.path.write_bytes(content)
    refused: PgcdcError | None = None
    try:
        stored.read()
    except PgcdcError as error:
        refused = error
    finally:
        stored.path.write_bytes(stored.content)
    assert refused is None or (refused.thing and "\n" not in str(refused))
    return refused


@pytest.mark.parametrize(
    ("name", "action", "field", "value"),
    [
        ("change log", "txn", "version", -1), ("change log", "txn", "appId", {}), ("change log", "add", "stats", "{}"),
        ("change log", "add", "path", 5), ("points", "add", "stats", "{}"), ("states", "add", "stats", "{}"),
        ("change log's first commit", "metaData", "configuration", {"pgcdc.format": "1"}),
        ("change log's first commit", "metaData", "configuration", {**PROPERTIES, "pgcdc.slot": None}),
        ("change log's first commit", "metaData", "configuration", {**PROPERTIES, "pgcdc.slot": 1}),
    ],
)  # fmt: skip
def test_a_delta_commit_with_a_wrong_value_is_refused(
    files: dict[str, Stored], name: str, action: str, field: str, value: object
) -> None:
    lines = [json.loads(line) for line in files[name].content.splitlines()]
    for line in lines:
        if action in line:
            line[action][field] = value
    assert refusal_of(files[name], "".join(f"{json.dumps(line)}\n" for line in lines).encode())


def test_a_prepared_transaction_without_its_highest_subxid_is_refused(files: dict[str, Stored]) -> None:
    content = json.loads(files["prepared"].content)
    for segment in content["segments"]:
        segment["highest"] = None
    assert refusal_of(files["prepared"], json.dumps(content).encode()) is not None


def test_a_prepared_transaction_with_a_name_that_no_file_can_have_is_refused(files: dict[str, Stored]) -> None:
    content = json.loads(files["prepared"].content)
    content["segments"][0]["file"] = "\x00\ud800"
    assert refusal_of(files["prepared"], json.dumps(content).encode()) is not None


def test_unknown_table_state_is_refused() -> None:
    row = {"state": "elsewhere", "lsn": 1, "reason": None, "shape": None, "at": None}
    with pytest.raises(PgcdcError, match=r"state of table public\.a: is damaged"):
        _row(A, row)


@FEW
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_with_a_pgcdc_error(files: dict[str, Stored], data: st.DataObject) -> None:
    check(files, data, data.draw(st.sampled_from(NAMES)))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@MANY
@given(data=st.data())
def test_many_damaged_files_are_read_or_refused(files: dict[str, Stored], name: str, data: st.DataObject) -> None:
    check(files, data, name)
