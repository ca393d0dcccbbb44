"""The snippets and commands in docs/guides/read_mirrors.md work as the page says, including `pgcdc sql`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaProtocolError
from pyspark.sql import SparkSession

from pgcdc_assets import Lake, logs
from pgcdc_assets.cli.main import run
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.names import TableName
from tests.lake.lakes import written_tables

PAGE: Final = (Path(__file__).parents[2] / "docs" / "guides" / "read_mirrors.md").read_text()
PYTHON: Final = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS: Final = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
ORDERS: Final = pa.table({
    "id": [99, 100, 101, 102], "customer": [1, 2, 1, 2],
    "total": pa.array([Decimal("10.00"), Decimal("20.00"), Decimal("300.00"), Decimal("4.50")], pa.decimal128(12, 2)),
    "at": pa.array([datetime(2026, 11, day, tzinfo=UTC) for day in (1, 1, 2, 2)], pa.timestamp("us", "UTC")),
})  # fmt: skip
CUSTOMERS: Final = pa.table({"id": [1, 2], "name": ["Ada", "Grace"]})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory has a lake with orders and customers. Order 102 is deleted."""
    monkeypatch.chdir(tmp_path)
    tables = {TableName("public", "orders"): ORDERS, TableName("public", "customers"): CUSTOMERS}
    written_tables(Location.of(tmp_path / "lake"), tables, deleted=[3])
    return tmp_path


def _ran(*, spark: bool) -> dict[str, Any]:
    """Runs the page's first snippet, then either the snippets for Spark or all other snippets. Returns their variables.
    The lake was made just now, so the page's ``hours=1`` becomes ``hours=0``."""
    names: dict[str, Any] = {}
    for snippet in PYTHON[:1] + [one for one in PYTHON[1:] if ("spark" in one) == spark]:
        exec(compile(snippet.replace("hours=1", "hours=0"), "read_mirrors.md", "exec"), names)
    return names


def test_python_snippets_give_what_the_page_says(project: Path) -> None:
    found = _ran(spark=False)
    assert found["orders"].num_rows == found["rows"] == 3
    assert found["recent"].to_pylist() == [{"id": 101, "total": Decimal("300.00")}]
    assert found["totals"].to_pylist() == [
        {"name": "Ada", "total": Decimal("310.00")}, {"name": "Grace", "total": Decimal("20.00")},
    ]  # fmt: skip
    assert found["one"]["customer"].to_pylist() == [1]
    assert found["count"] == [(1,)]
    assert found["large"].rows() == [(101, Decimal("300.00"))]
    assert pa.table(found["found"]).columns[0].to_pylist() == [3]
    assert found["earlier"].lsn == found["same"].lsn == found["point"].lsn


@pytest.mark.long
@pytest.mark.spark
def test_spark_snippet_gives_what_the_page_says(project: Path, spark: SparkSession) -> None:
    found = _ran(spark=True)
    assert found["by_day"].iloc[:, 1].tolist() in ([2, 1], [1, 2])
    assert found["data_frame"].count() == 3


def test_commands_give_what_the_page_says(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table, csv, objects = (_output(shlex.split(command), capfd) for command in COMMANDS)
    assert "3 │        330.00" in table
    assert csv.splitlines()[0].startswith("id,customer,total,at,")
    assert csv.splitlines()[1].startswith("101,1,300.00,2026-11-02 00:00:00+00,")
    assert [line[:20] for line in objects.splitlines()] == ['{"id":1,"name":"Ada"', '{"id":2,"name":"Grac']


def test_pgcdc_sql_reads_at_an_lsn_or_a_time(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    at = Lake("lake").at()
    for place in (str(at.lsn), datetime.now(UTC).isoformat(), datetime.now().isoformat()):
        assert _output(["pgcdc", "sql", "SELECT 1 FROM orders LIMIT 1;", "--format", "csv", "--at", place], capfd)
    assert run(["sql", "SELECT 1", "--at", "FFFF/0"]) == 0
    assert capfd.readouterr().err == f"at LSN {at.lsn}, the newest consistent point\n"
    for arguments, code, message in (
        (["FROM ordrs"], 2, "Table with name ordrs does not exist"), (["SELEC 1"], 2, "syntax error"),
        (["SELECT 1; DROP VIEW orders"], 2, "query: has 2 statements; write exactly one"),
        ([" ; ", "--format", "csv"], 2, "query: has 0 statements; write exactly one"),
        (["FROM orders", "--at", "0/1"], 1, "has no consistent point at or below 0/1"),
        (["FROM orders", "--at", "yesterday"], 2, "'yesterday' is neither an LSN like 0/16B3748 nor a time"),
    ):  # fmt: skip
        assert run(["sql", *arguments]) == code
        assert message in capfd.readouterr().err


def test_error_of_pgcdc_sql_contains_no_control_sequence(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["sql", "SELECT (chr(27) || '[31mred')::int FROM orders"]) == 2
    errors = capfd.readouterr().err
    assert "red" in errors
    assert "\x1b" not in errors


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_pgcdc_sql_prints_no_control_sequence_on_a_terminal(
    form: str, project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = _output(["pgcdc", "sql", "SELECT chr(27) || '[31mred' AS v FROM orders", "--format", form], capfd)
    assert "[31mred" in shown
    assert "\x1b" not in shown


def test_json_log_line_of_a_failed_query_contains_no_value_of_a_row(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(logs.VARIABLE, logs.JSON)
    errors = []
    try:
        for query in ("SELECT name::int FROM customers", "SELECT strptime(name, '%d') FROM customers", "FROM ordrs"):
            assert run(["sql", query]) == 2
            errors.append(json.loads(capfd.readouterr().err.splitlines()[-1])["message"])
    finally:
        logs.begin(as_json=False)
    assert errors[:2] == ["the query failed: ConversionException", "the query failed: InvalidInputException"]
    assert "Table with name ordrs does not exist" in errors[2]


def test_pgcdc_sql_prints_no_traceback_if_its_output_is_closed_early(project: Path) -> None:
    code = "from pgcdc_assets.cli.main import main; main()"
    command = [sys.executable, "-c", code, "sql", "FROM range(300000)", "--format", "csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == f"at LSN {Lake('lake').at().lsn}\n"
    assert process.returncode == 1


def test_delta_rs_refuses_mirrors_as_the_page_says(project: Path) -> None:
    point = Lake("lake").at()
    with pytest.raises(DeltaProtocolError, match=r"The table has set these reader features: \{'deletionVectors'\}"):
        DeltaTable(point.path("orders"), version=point.versions["orders"]).to_pandas()


def _output(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert run(words[1:]) == 0
    streams = capfd.readouterr()
    assert streams.err == f"at LSN {Lake('lake').at().lsn}\n"
    return streams.out
