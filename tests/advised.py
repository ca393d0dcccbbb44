"""Finds, in the source code, all advice that the program can print. Advice is the text after the ``;`` in the message
of an error, of a finding of setup, or of a problem of status. The code passes advice as the argument ``do``, or takes
it from the class attribute ``advice``, from constants, or from the results of functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent.parent / "pgcdc_assets"
_PLACES: Final = {"Finding": 3, "Problem": 3, "error": 3, "warning": 3}
"""By name of a called class or function: the index of the positional argument that is advice."""
_NAMES: Final = {"do", "advice", "by_hand", "install", "raised", "add"}
"""Names of variables and class attributes to which the code assigns advice."""
_FUNCTIONS: Final = {"way_back", "_back", "_again", "_set", "_form"}
"""Functions that return advice."""
_TABLES: Final = {"_BY_STATE", "_NO_WALSENDER"}
"""Tables in failures.py: a dictionary and a tuple. The last element of each entry is advice."""


def advice() -> set[str]:
    """All advice in the source code, with ``{}`` in place of each value."""
    trees = [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    constants = {name: value for tree in trees for name, value in _constants(tree)}
    return {
        text for tree in trees for node in _advising(tree) for text in _texts(node, constants) if text.strip("{}; ")
    }


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def _advising(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "do")
            name = node.func.id if isinstance(node.func, ast.Name) else None
            if name == "say" and len(node.args) == 3:  # `say` is an alias of `error` and `warning`
                name = "error"
            place = _PLACES.get(name or "")
            if place is not None and len(node.args) > place:
                yield node.args[place]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in _NAMES:
                yield node.value
            elif isinstance(target, ast.Name) and target.id in _TABLES:
                yield from _last_of_each(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS:
            yield from (one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None)


def _last_of_each(table: ast.expr) -> Iterator[ast.expr]:
    entries = table.values if isinstance(table, ast.Dict) else table.elts if isinstance(table, ast.Tuple) else []
    yield from (entry.elts[-1] for entry in entries if isinstance(entry, ast.Tuple))


def _texts(node: ast.expr, constants: dict[str, ast.expr]) -> list[str]:
    """The possible texts of an expression, with ``{}`` for unknown parts."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.Constant():
            return []
        case ast.JoinedStr(values=parts):
            return _joined(parts, constants)
        case ast.FormattedValue(value=value) | ast.NamedExpr(value=value):
            return _texts(value, constants)
        case ast.IfExp(body=body, orelse=other):
            return [*_texts(body, constants), *_texts(other, constants)]
        case ast.BoolOp(values=values):
            return [text for value in values for text in _texts(value, constants)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined([left, right], constants)
        case ast.Name(id=name) if name in constants:
            return _texts(constants[name], constants)
        case _:
            return ["{}"]


def _joined(parts: list[ast.expr], constants: dict[str, ast.expr]) -> list[str]:
    texts = [""]
    for part in parts:
        texts = [before + text for before in texts for text in _texts(part, constants) or [""]]
    return texts
