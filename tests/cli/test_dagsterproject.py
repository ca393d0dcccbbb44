"""With the option ``--component``, commands take their settings from a component of a Dagster project. Also: two
projects with one Dagster instance, and the filter for requests to the webserver of ``pgcdc up``."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import click
import pytest

from pgcdc_assets.cli.arguments import is_component
from pgcdc_assets.cli.dagsterui import SameOrigin, guarded, refusal
from pgcdc_assets.cli.jobs import instance
from pgcdc_assets.cli.main import pgcdc, run
from pgcdc_assets.defs.partitions import RangeRegister, claim
from pgcdc_assets.settings import PREFIX, Settings
from tests.cli.conftest import Shell
from tests.defs.catalogs import NAMES, catalog_of
from tests.defs.doubles import span

PYPROJECT: Final = """
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "shop_project"
"""
COMPONENT: Final = """
type: pgcdc_assets.PgcdcComponent
attributes:
  name: shop
  source: '{{ env.SHOP_DSN }}'
  lake: lake/shop
  tables: ["public.*"]
  settings: {retention: 14 days, two_phase: true, spark: {master: "local[1]"}}
"""
DSN: Final = "host=nowhere.invalid dbname=shop password=geheim"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Dagster project with one component. The project's folder is the working directory. The environment variables
    contain settings of a different project."""
    folder = tmp_path / "src/shop_project/defs/shop"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (folder / "defs.yaml").write_text(COMPONENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if PREFIX not in name})
    os.environ.update(SHOP_DSN=DSN, PGCDC_NAME="crm", PGCDC_SLOT="other")
    yield tmp_path
    for module in [name for name in sys.modules if name.startswith("shop_project")]:
        del sys.modules[module]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, bool]]:
    """Adds a command ``show`` to pgcdc. Each call of ``show`` appends two values to the returned list: the settings
    that it uses, and whether these settings come from a component."""
    found: list[tuple[Settings, bool]] = []
    show = click.command("show")(lambda: found.append((Settings.load(), is_component())))
    monkeypatch.setitem(pgcdc.commands, "show", show)
    return found


def test_a_command_with_the_option_component_uses_the_settings_of_this_component(
    project: Path, shown: list[tuple[Settings, bool]]
) -> None:
    assert run(["--component", "shop", "show"]) == 0
    ((found, of_component),) = shown
    assert of_component
    assert (found.name, found.slot, found.source) == ("shop", "pgcdc_shop", DSN)
    assert (found.lake, found.state) == (project / "lake/shop", project / ".pgcdc/shop")
    assert (found.tables, found.retention, found.two_phase) == (("public.*",), timedelta(days=14), True)
    assert found.spark == {"master": "local[1]"}
    assert json.loads(os.environ["PGCDC_TABLES"]) == ["public.*"]  # Child processes read these variables.


@pytest.mark.parametrize(("option", "form"), [((), "json"), (("--log-format", "text"), "text")])
def test_log_lines_have_the_format_of_the_component_unless_an_option_sets_it(
    project: Path, capfd: pytest.CaptureFixture[str], option: tuple[str, ...], form: str
) -> None:
    file = project / "src/shop_project/defs/shop/defs.yaml"
    file.write_text(file.read_text().replace("settings: {", "settings: {log_format: json, "))
    assert run([*option, "--component", "shop", "positions"]) == 1
    assert capfd.readouterr().err.startswith("{" if form == "json" else "pgcdc: ")
    assert os.environ["PGCDC_LOG_FORMAT"] == form


def test_without_the_option_component_the_settings_come_from_environment_variables(
    project: Path, shown: list[tuple[Settings, bool]]
) -> None:
    assert run(["show"]) == 0
    assert [(found.name, of_component) for found, of_component in shown] == [("crm", False)]


@pytest.mark.parametrize(
    ("component", "change", "cause"),
    [
        ("crm", lambda _: None, "component crm: cannot be loaded: No component found"),
        ("shop", lambda _: os.environ.pop("SHOP_DSN"), "attribute `source`: Input should be a valid string"),
        ("shop", lambda project: sys.path.remove(str(project / "src")), "No module named 'shop_project'"),
        ("shop", lambda project: (project / "pyproject.toml").unlink(), "Could not find config file"),
    ],
    ids=["unknown", "without a variable", "not installed", "outside a project"],
)
def test_the_error_for_a_component_that_cannot_be_loaded_names_the_cause(
    project: Path, shown: list[tuple[Settings, bool]], component: str, change: Callable[[Path], object], cause: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    change(project)
    assert run(["--component", component, "show"]) == 2
    told = capfd.readouterr().err
    assert cause in told
    assert "geheim" not in told
    assert "Traceback" not in told
    assert shown == []


# Two projects with one DAGSTER_HOME -----------------------------------------------------------------

FIRST = catalog_of(("public", "orders"), slot="first")


@pytest.fixture
def shared(shell: Shell, tmp_path: Path) -> Shell:
    """A shell whose Dagster instance another project has used."""
    home = tmp_path / "dagster"
    home.mkdir()
    shell.patch.setenv("DAGSTER_HOME", str(home))
    with instance() as runs:
        claim(runs, NAMES, FIRST.identity)
        RangeRegister(runs, NAMES).add(span(0x10, 0x20))
    return shell


def test_commands_of_a_second_project_with_the_same_name_are_refused_before_they_start_a_run(shared: Shell) -> None:
    """Both projects use the same Dagster instance. ``pgcdc teardown`` of the second project is allowed. The name then
    still belongs to the first project."""
    shared.pgcdc("setup")
    for arguments in (["sync"], ["follow"], ["maintain"], ["snapshot", "a"]):
        said = shared.pgcdc(*arguments, expect=2)
        assert "uses the name pgcdc for another project, which reads slot first of system 7" in said
        assert "DAGSTER_HOME" in said
        assert len(said.strip().splitlines()) == 2
    assert not Path("lake").exists()
    with instance() as runs:
        assert runs.get_runs_count() == 0
        assert RangeRegister(runs, NAMES).known() == [span(0x10, 0x20)]
    shared.pgcdc("teardown", "--yes")
    with instance() as runs:
        claim(runs, NAMES, FIRST.identity)


# Which HTTP requests Dagster's webserver answers and which it refuses under ``pgcdc up`` ------------

OWN_PAGE = {"origin": "http://localhost:3000", "sec-fetch-site": "same-origin"}
OURS = {"host": "localhost:3000"}
PAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
IMAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}

ANSWERED = {
    "a page that the user opens": ("GET", "/", OURS | {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}),
    "a link from elsewhere to a page": ("GET", "/runs", OURS | PAGE),
    "the UI's own query": ("POST", "/graphql", OURS | OWN_PAGE),
    "the UI's own WebSocket": ("GET", "/graphql", OURS | {"upgrade": "websocket", "origin": "http://localhost:3000"}),
    "a program": ("POST", "/graphql", {"host": "127.0.0.1:3000"}),
    "a program by IPv6": ("POST", "/graphql", {"host": "[::1]:3000"}),
}
REFUSED = {
    "an image whose address is a mutation": ("GET", "/graphql", OURS | IMAGE),
    "a link whose address is a mutation": ("GET", "/graphql", OURS | PAGE),
    "a mutation by GET of an old browser": ("GET", "/graphql/", OURS),
    "a mutation by HEAD": ("HEAD", "/graphql", OURS),
    "an image of another site": ("GET", "/runs", OURS | IMAGE),
    "an image of another port": ("GET", "/runs", OURS | {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}),
    "a form of another site without an origin": ("POST", "/report_asset_materialization/a", OURS | PAGE),
    "a form of another site": ("POST", "/graphql", OURS | {"origin": "https://evil.example"} | PAGE),
    "a POST of another port": ("POST", "/graphql", OURS | {"origin": "http://localhost:8000"}),
    "a POST of a page without an origin": ("POST", "/report_asset_materialization/a", OURS | {"origin": "null"}),
    "another site's WebSocket": ("GET", "/graphql", OURS | {"upgrade": "websocket", "origin": "https://evil.example"}),
    "a host name of another site": ("GET", "/", {"host": "evil.example:3000"}),
    "no host name": ("GET", "/", {}),
    "an address of another machine": ("GET", "/", {"host": "10.1.2.3:3000"}),
    "a host that cannot be parsed": ("GET", "/", {"host": "[::1"}),
}


@pytest.mark.parametrize("case", ANSWERED)
def test_a_request_of_the_user_the_ui_or_a_program_on_this_machine_is_answered(case: str) -> None:
    assert refusal(*ANSWERED[case], "127.0.0.1") is None


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_another_site_could_forge_is_refused(case: str) -> None:
    assert refusal(*REFUSED[case], "127.0.0.1")


@pytest.mark.parametrize("host", ["10.1.2.3:3000", f"{socket.gethostname()}:3000", "localhost:3000"])
def test_a_webserver_on_all_interfaces_accepts_as_host_only_ip_addresses_and_its_own_names(host: str) -> None:
    assert refusal("GET", "/", {"host": host}, "0.0.0.0") is None
    assert refusal("GET", "/", {"host": "evil.example"}, "0.0.0.0")


def _sent(scope: dict[str, Any]) -> list[MutableMapping[str, Any]]:
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "answered"})

    async def receive() -> MutableMapping[str, Any]:
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(SameOrigin(app, "127.0.0.1")(scope, receive, send))
    return sent


def test_refused_requests_do_not_reach_dagsters_webserver() -> None:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost:3000")]}
    assert _sent(scope) == [{"type": "answered"}]
    assert _sent({"type": "lifespan"}) == [{"type": "answered"}]
    refused = _sent(scope | {"headers": [(b"host", b"evil.example")]})
    assert refused[0]["status"] == 403
    assert b"evil.example" in refused[1]["body"]
    socket = {"type": "websocket", "path": "/graphql", "headers": [(b"host", b"evil.example")]}
    assert [message["type"] for message in _sent(socket)] == ["websocket.close"]


def test_pgcdc_up_adds_the_request_filter_to_the_webserver_and_not_to_the_daemon() -> None:
    daemon = ["python", "-m", "dagster._daemon", "run"]
    assert guarded(daemon) == daemon
    webserver = guarded(["python", "-m", "dagster_webserver", "--host", "127.0.0.1"])
    assert webserver == ["python", "-m", "pgcdc_assets.cli.dagsterui", "webserver", "--host", "127.0.0.1"]
