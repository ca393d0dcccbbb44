"""Applies an override: replaces the function right after the function's module was executed, before any other module
imports from this module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Final

from tests.overrides.override import Make, original_of, overrides, owner_of

VARIABLE: Final = "PGCDC_TEST_OVERRIDE"
"""The environment variable with the name of the override. Every process with ``site/`` on its PYTHONPATH applies this
override."""


def apply(name: str) -> None:
    """Applies the override. Must be called before the package is imported."""
    found = overrides()[name]
    modules: dict[str, dict[str, Make]] = {}
    for target in found.targets:
        modules.setdefault(target.split(":")[0], {})[target] = found.make
    if early := modules.keys() & sys.modules.keys():
        raise ImportError(f"imported before the override: {', '.join(sorted(early))}")
    sys.meta_path.insert(0, _Finder(modules))


class _Finder(MetaPathFinder):
    def __init__(self, modules: Mapping[str, Mapping[str, Make]]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return spec
        loader = _Loader(fullname, spec.origin, self._modules[fullname])
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, targets: Mapping[str, Make]) -> None:
        super().__init__(fullname, path)
        self._targets = targets

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for target, make in self._targets.items():
            owner, name = owner_of(target, module)
            setattr(owner, name, make(original_of(target, module)))
