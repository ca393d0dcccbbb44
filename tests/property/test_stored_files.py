"""Files of ours that somebody has damaged: each is read as a value, or refused in one error of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow import outcomes, sentinel
from pgcdc_assets.log.commit import LogWriter
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.savedcatalog import load_catalog, save_catalog
from pgcdc_assets.store.chainlease import Chain, Link
from tests.defs.catalogs import catalog_of
from tests.deltatables import publish_at
from tests.log.written import START, WHO, frames_of, writer_of
from tests.property.damage import damaged, damaged_json

CATALOG = catalog_of(("public", "a"), ("public", "b"))
A = TableName("public", "a")
ALL = LsnRange(Lsn(0), Lsn(1 << 60))
FEW = settings(max_examples=120, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=1000)


@dataclass(frozen=True, repr=False)
class Stored:
    """A file of ours, and all that reads it."""

    path: Path
    content: bytes
    read: Callable[[], object]


def newest_commits(log: Path) -> list[Path]:
    return sorted(log.glob("*.json"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stored]:
    """A project with a lake: one file of each kind."""
    root = tmp_path_factory.mktemp("project")
    layout = Layout.of(root / "lake")
    log = ChangeLog(layout)
    log.create(WHO, START, 3)
    writer, _ = writer_of(log)
    writer.commit(frames_of(200), [], Lsn(250))
    publish_at(ConsistentPoints(layout), 250, {A: 1})
    TableStates(layout).set(CATALOG.tables[0], TableState.STREAMING, Lsn(250))
    with outcomes.recorded(layout, outcomes.OperationKind.SYNC, "sync", lambda text: None):
        pass
    sentinel.follow_until(layout, Lsn(300))
    save_catalog(CATALOG, root / "catalog.json")
    chain = Location.of(root / "chain")
    (root / "chain").mkdir()
    (root / "chain" / f"{1:020}").write_bytes(Link(1).to_bytes())

    def read_log() -> None:
        found = ChangeLog(layout)
        found.batches(Lsn(0)), found.segments(ALL), found.shapes(ALL), found.position(), found.timeline
        found.verify(ALL)
        LogWriter(layout.change_log, WHO)

    def read_points() -> object:
        points = ConsistentPoints(layout)
        return points.newest(), points.at(Lsn(250)), points.oldest(), points.listing(A), points.versions([A])

    def logs(folder: Location) -> Path:
        return Path(str(folder)) / "_delta_log"

    found: dict[str, tuple[Path, Callable[[], object]]] = {
        "saved catalog": (root / "catalog.json", lambda: load_catalog(root / "catalog.json")),
        "outcomes": (Path(str(layout.outcomes)), lambda: outcomes.read(layout)),
        "endpos": (Path(str(layout.endpos)), lambda: sentinel.read(layout)),
        "lease": (root / "chain" / f"{1:020}", lambda: Chain(chain).look()),
        "change log": (newest_commits(logs(layout.change_log))[-1], read_log),
        "change log's first commit": (newest_commits(logs(layout.change_log))[0], read_log),
        "points": (newest_commits(logs(layout.consistent_points))[-1], read_points),
        "points' first commit": (newest_commits(logs(layout.consistent_points))[0], read_points),
        "states": (newest_commits(logs(layout.table_states))[-1], lambda: TableStates(layout).all()),
    }
    return {name: Stored(path, path.read_bytes(), read) for name, (path, read) in found.items()}


NAMES = ["saved catalog", "outcomes", "endpos", "lease", "change log", "change log's first commit", "points",
         "points' first commit", "states"]  # fmt: skip


def check(files: dict[str, Stored], data: st.DataObject, name: str) -> None:
    stored = files[name]
    stored.path.write_bytes(data.draw(damaged_json(stored.content) if name != "endpos" else damaged(stored.content)))
    refused: PgcdcError | None = None
    try:
        stored.read()
    except PgcdcError as error:
        refused = error
    finally:
        stored.path.write_bytes(stored.content)
    assert refused is None or (refused.thing and "\n" not in str(refused))


@FEW
@given(data=st.data())
def test_a_damaged_file_is_a_value_or_one_error(files: dict[str, Stored], data: st.DataObject) -> None:
    check(files, data, data.draw(st.sampled_from(NAMES)))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@MANY
@given(data=st.data())
def test_many_damaged_files_are_values_or_one_error(files: dict[str, Stored], name: str, data: st.DataObject) -> None:
    check(files, data, name)
