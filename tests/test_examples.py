"""The example project shop_analytics, installed and run as its README says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from tests.fix_postgres import Database, fresh_database

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.takes(400), pytest.mark.timeout(1800)]

CHECKOUT: Final = Path(__file__).parent.parent
EXAMPLE: Final = CHECKOUT / "examples/shop_analytics"
UV: Final = Path(sys.executable).with_name("uv")
QUERY: Final = """
import duckdb, json, sys
with duckdb.connect("warehouse.duckdb", read_only=True) as db:
    print(json.dumps(db.execute(sys.argv[1]).fetchall(), default=str))
"""


class Project:
    """A copy of the example with a separate virtual environment, and its two databases."""

    def __init__(self, folder: Path, shop: Database, crm: Database) -> None:
        self.folder, self.shop = folder, shop
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PGCDC_", "DAGSTER_", "PYTHON"))
        }
        self._environment |= {
            "SHOP_DSN": shop.conninfo,
            "CRM_DSN": crm.conninfo,
            "DAGSTER_HOME": str(folder / "dagster_home"),
            "PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}",
        }

    def run(self, program: str, *arguments: str) -> str:
        command = [str(self.folder / ".venv/bin" / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self._environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def sync(self) -> None:
        """Updates the mirrors, the DuckDB tables and the models with everything that is committed."""
        self.run("dg", "launch", "--job", "shop_sync")
        self.run("dg", "launch", "--job", "crm_sync")
        self.run("dg", "launch", "--assets", "kind:duckdb or kind:dbt")

    def rows(self, query: str) -> Any:
        return json.loads(self.run("python", "-c", QUERY, query))


@pytest.fixture
def project(server: EmbeddedServer, tmp_path: Path) -> Iterator[Project]:
    folder = tmp_path / "shop_analytics"
    shutil.copytree(EXAMPLE, folder)
    text = (folder / "pyproject.toml").read_text()
    assert '"../.."' in text
    (folder / "pyproject.toml").write_text(text.replace('"../.."', f'"{CHECKOUT}"'))
    subprocess.run([UV, "sync", "--quiet", "--python", sys.executable], cwd=folder, check=True)
    with fresh_database(server) as shop, fresh_database(server) as crm:
        for database, script in ((shop, "shop.sql"), (crm, "crm.sql")):
            with database.connect() as conn:
                conn.execute((folder / "sample" / script).read_text())
        project = Project(folder, shop, crm)
        for name in ("shop", "crm"):
            project.run("pgcdc", "--component", name, "setup")
        yield project
        for name in ("shop", "crm"):
            project.run("pgcdc", "--component", name, "teardown", "--yes")


def test_models_of_the_example_project_have_the_same_totals_as_its_databases(project: Project) -> None:
    project.run("dg", "check", "defs")
    project.sync()
    with project.shop.connect() as conn:
        expected = "SELECT count(DISTINCT order_id), sum(quantity * price) FROM order_lines"
        first = conn.execute(expected).fetchall()
        assert project.rows(expected.replace("FROM ", "FROM shop_warehouse.")) == _as_json(first)
        conn.execute("CALL place_order(7)")
        conn.execute("CALL place_order(1000)")  # a customer that the database `crm` does not have
        project.sync()
        last = conn.execute(expected).fetchall()
    assert first != last
    assert project.rows(expected.replace("FROM ", "FROM shop_warehouse.")) == _as_json(last)
    assert project.rows("SELECT sum(revenue) FROM revenue_by_product") == _as_json([last[0][1:]])
    assert project.rows("SELECT country FROM revenue_by_country ORDER BY 1") == [["DE"], ["FR"], ["JP"], ["unknown"]]
    for name in ("shop", "crm"):
        project.run("pgcdc", "--component", name, "verify")


def _as_json(rows: list[tuple[Any, ...]]) -> Any:
    """The rows in the form of :meth:`Project.rows`, with decimals as texts."""
    return json.loads(json.dumps(rows, default=str))
