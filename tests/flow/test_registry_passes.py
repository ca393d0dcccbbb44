"""When a sync registers mirrors in a catalog of query engines. The run and the catalog are fakes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgcdc_assets.core.catalog import Column, Identity, PgType, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import RegistryRefused, RegistryUnreachable
from pgcdc_assets.flow import registration
from pgcdc_assets.flow.registration import RegisteredTables, Registration, registering
from pgcdc_assets.flow.work import Work
from pgcdc_assets.registry.named import NamedTable
from pgcdc_assets.settings import Settings
from tests.waiting import wait_for

T, U = TableName("public", "t"), TableName("public", "u")
INT = PgType(23, "int4", -1)


@dataclass
class Catalog:
    """A fake catalog of query engines that records the calls it gets. ``refused``: the tables that it refuses."""

    calls: list[str] = field(default_factory=list)
    refused: set[TableName] = field(default_factory=set)
    down: bool = False
    answers: threading.Event = field(default_factory=threading.Event)

    def put(self, table: NamedTable) -> None:
        self.calls.append(f"put {table.name}")
        self.answers.wait(60)
        if self.down:
            raise RegistryUnreachable("does not answer", thing="catalog")
        if table.name in self.refused:
            raise RegistryRefused("answered no", thing="catalog")

    def remove(self, name: TableName, owner: str) -> None:
        self.calls.append(f"remove {name} of {owner}")

    def close(self) -> None:
        pass


@dataclass
class Run:
    """A fake run. ``tables``: the followed tables. ``kept``: the tables whose mirrors exist. The newest point lists T
    and U."""

    settings: Settings
    tables: dict[TableName, Table]
    told: list[str] = field(default_factory=list)
    kept: set[TableName] = field(default_factory=set)

    @property
    def work(self) -> Work:
        newest = SimpleNamespace(tables={T: 1, U: 1})
        progress = _Progress({name: SimpleNamespace(table=table) for name, table in self.tables.items()})
        progress.points = SimpleNamespace(newest=lambda: newest)
        return cast("Work", SimpleNamespace(
            settings=self.settings, layout=self.settings.layout, identity=Identity("7", "shop", "s"),
            progress=progress, target=SimpleNamespace(keeps=lambda name: name in self.kept),
            observer=SimpleNamespace(progress=lambda stage, text: self.told.append(text)), session=None,
        ))  # fmt: skip

    @property
    def record(self) -> RegisteredTables:
        return RegisteredTables.read(self.settings.layout)


class _Progress(dict[TableName, Any]):
    points: Any


def _table(name: TableName, *columns: str) -> Table:
    return Table(1, name, tuple(Column(place, one, INT) for place, one in enumerate(columns, 1)))


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    made = Catalog()
    made.answers.set()
    monkeypatch.setattr(registration, "opened_registry", lambda *_: made)
    yield made
    made.answers.set()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    for name in (T, U):
        write_deltalake(Layout.of(tmp_path).mirror(name).text, pa.table({"id": pa.array([1], pa.int32())}))
    settings = Settings.of(lake=tmp_path, registry={"glue": "eu-central-1"})
    return Run(settings, {T: _table(T, "id"), U: _table(U, "id")}, kept={T, U})


def _run(run: Run) -> None:
    with registering(run.work):
        pass


def test_second_run_without_changes_sends_no_request_to_the_catalog(run: Run, catalog: Catalog) -> None:
    _run(run)
    assert catalog.calls == ["put public.t", "put public.u"]
    assert run.record.tables.keys() == {T, U}
    _run(run)
    assert len(catalog.calls) == 2


def test_table_with_a_new_column_is_registered_again(run: Run, catalog: Catalog) -> None:
    _run(run)
    run.tables[T] = _table(T, "id", "note")
    _run(run)
    assert catalog.calls[2:] == ["put public.t"]


def test_table_with_a_new_comment_is_registered_again(run: Run, catalog: Catalog) -> None:
    _run(run)
    run.tables[U] = replace(run.tables[U], comments=((0, "all of them"),))
    _run(run)
    assert catalog.calls[2:] == ["put public.u"]


def test_catalog_entry_stays_until_its_mirror_is_deleted(run: Run, catalog: Catalog) -> None:
    _run(run)
    del run.tables[U]
    _run(run)
    assert len(catalog.calls) == 2
    run.kept.remove(U)
    _run(run)
    assert catalog.calls[2:] == ["remove public.u of pgcdc/7/shop/s/public.u"]
    assert run.record.tables.keys() == {T}


def test_table_that_the_catalog_refuses_does_not_delay_other_tables(run: Run, catalog: Catalog) -> None:
    catalog.refused = {T}
    _run(run)
    assert run.record.tables.keys() == {U}
    assert run.record.failed == {"public.t": "catalog: answered no"}
    assert run.told == [
        "a mirror was not registered: catalog: answered no",
        "catalog entries that were made, checked or removed: 1",
    ]
    catalog.refused = set()
    _run(run)
    assert not run.record.failed
    assert catalog.calls[2:] == ["put public.t"]


def test_catalog_that_is_down_gets_at_most_one_request_a_minute(
    run: Run, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog.down = True
    now = [1000.0]
    monkeypatch.setattr("pgcdc_assets.flow.registration.time.monotonic", lambda: now[0])
    points = Registration(run.work, {"glue": "x"})
    points.after_point()
    assert points._thread is not None
    points._thread.join()
    for _ in range(3):
        points.after_point()
    assert catalog.calls == ["put public.t"]
    assert list(run.record.failed) == [""]
    now[0] += registration.AGAIN_SECONDS
    points.after_point()
    points.close(waits=True)
    assert catalog.calls == ["put public.t"] * 2


def test_point_does_not_wait_for_a_catalog_that_hangs(run: Run, catalog: Catalog) -> None:
    catalog.answers.clear()
    points = Registration(run.work, {"glue": "x"})
    points.after_point()
    wait_for(lambda: catalog.calls, what="the first request")
    points.after_point()
    assert catalog.calls == ["put public.t"]
    # A run that ends with an error does not wait for the catalog either. The thread that registers mirrors sends no
    # further request.
    points.close(waits=False)
    catalog.answers.set()
    wait_for(lambda: not any(one.name == "register" for one in threading.enumerate()), what="the thread's end")
    assert catalog.calls == ["put public.t"]
    assert not run.record.tables


def test_all_tables_are_registered_again_if_the_setting_registry_names_another_catalog(
    run: Run, catalog: Catalog
) -> None:
    _run(run)
    run.settings = run.settings.model_copy(update={"registry": {"glue": "eu-north-1"}})
    _run(run)
    assert len(catalog.calls) == 4


def test_all_tables_are_registered_again_if_registered_json_is_damaged(run: Run, catalog: Catalog) -> None:
    _run(run)
    (Path(run.settings.layout.root.text) / "_pgcdc" / "registered.json").write_text("{")
    _run(run)
    assert len(catalog.calls) == 4
    assert run.record.tables.keys() == {T, U}


def test_unexpected_error_of_the_catalog_does_not_end_the_run(
    run: Run, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(registration, "opened_registry", fail)
    _run(run)
    assert run.record.failed == {"": "unexpected RuntimeError"}


def test_without_the_setting_registry_no_request_is_sent_and_no_file_is_written(run: Run, catalog: Catalog) -> None:
    run.settings = run.settings.model_copy(update={"registry": None})
    _run(run)
    assert not catalog.calls
    assert not (Path(run.settings.layout.root.text) / "_pgcdc").exists()
