"""What an override is, and functions that make a changed copy of a function of the package."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

THEMES: Final = ("log", "source", "rows", "tables", "flow")
"""The modules that hold overrides."""

Original = Any
"""What the override replaces in the module or class: a function, a property or a constant."""
Make = Callable[[Original], Any]


@dataclass(frozen=True)
class Override:
    """A broken promise. ``targets``: the functions to replace, as ``module:name`` or ``module:Class.name``. ``rule``:
    the promise. ``test``: the node id of the test that must fail."""

    name: str
    targets: tuple[str, ...]
    rule: str
    test: str
    make: Make


_ALL: dict[str, Override] = {}


def override(name: str, targets: str | tuple[str, ...], make: Make, *, rule: str, test: str) -> None:
    """Defines an override. ``make`` gets the original value of each target, and returns its replacement."""
    if name in _ALL:
        raise ValueError(f"there are two overrides {name}")
    _ALL[name] = Override(name, (targets,) if isinstance(targets, str) else targets, rule, test, make)


def overrides() -> dict[str, Override]:
    """All overrides by name. Imports no module of the package."""
    for theme in THEMES:
        importlib.import_module(f"tests.overrides.{theme}")
    return dict(_ALL)


def owner_of(target: str, module: Any) -> tuple[Any, str]:
    """The class or module that contains the target, and the target's name in it."""
    *classes, name = target.split(":")[1].split(".")
    owner = module
    for each in classes:
        owner = getattr(owner, each)
    return owner, name


def original_of(target: str, module: Any) -> Original:
    """The target's original value. Raises AttributeError if the target does not exist or is inherited."""
    owner, name = owner_of(target, module)
    if name not in vars(owner):
        raise AttributeError(f"{target} does not exist")
    return vars(owner)[name]


# Changed functions -----------------------------------------------------------------------------------


def without(original: Original, *starts: str) -> Any:
    """The same function without the statements that begin with one of ``starts``, such as ``raise LogAhead``.

    Raises LookupError if the function has no such statement.
    """
    return _compiled(original, _Without(starts), starts)


def with_instead(original: Original, old: str, new: str) -> Any:
    """The same function with the expression ``new`` instead of ``old``. Raises LookupError if the function does not
    contain ``old``."""
    return _compiled(original, _Instead(old, new), (old,))


class _Change(ast.NodeTransformer):
    def __init__(self) -> None:
        self.done: set[str] = set()


class _Without(_Change):
    def __init__(self, starts: tuple[str, ...]) -> None:
        super().__init__()
        self._starts = starts

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.Expr, ast.Raise, ast.Assign, ast.AugAssign, ast.Return)):
            text = ast.unparse(node)
            for start in self._starts:
                if text.startswith(start):
                    self.done.add(start)
                    return ast.copy_location(ast.Pass(), node)
        return super().generic_visit(node)


class _Instead(_Change):
    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self._old = ast.unparse(ast.parse(old, mode="eval"))
        self._text = old
        self._new = ast.parse(new, mode="eval").body

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and ast.unparse(node) == self._old:
            self.done.add(self._text)
            return ast.copy_location(self._new, node)
        return super().generic_visit(node)


def _compiled(original: Original, change: _Change, wanted: tuple[str, ...]) -> Any:
    function = inspect.unwrap(original)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = next(_definitions(tree))
    # The changed function is made without the decorators of the original function.
    definition.decorator_list = []
    change.visit(tree)
    if missing := set(wanted) - change.done:
        raise LookupError(f"{function.__qualname__} has no {', '.join(sorted(missing))}")
    flags = annotations.compiler_flag
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec", flags, dont_inherit=True)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    return made[definition.name]


def _definitions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in tree.body if isinstance(node, ast.FunctionDef))
