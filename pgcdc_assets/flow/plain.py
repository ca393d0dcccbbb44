"""Converts requests and reports to plain JSON, and back by the types of their fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange

_TEXTS: dict[type, Any] = {Lsn: Lsn.parse, TableName: TableName.parse, LsnRange: LsnRange.parse}
"""Types that become one text, as people write it, and the function that reads it."""


def to_plain(value: Any) -> Any:
    if isinstance(value, (*_TEXTS, StrEnum)):
        return str(value)
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, data: Any) -> Any:
    """The value of this type. Raises ValueError, KeyError or TypeError for anything else."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if data is None else from_plain(next(one for one in arguments if one is not NoneType), data)
    if kind in _TEXTS:
        return _TEXTS[kind](data)
    if is_dataclass(kind):
        made: Any = kind
        hints = get_type_hints(made)
        return made(**{field.name: from_plain(hints[field.name], data[field.name]) for field in fields(kind)})
    if origin is None:
        return kind(data)
    if issubclass(origin, Mapping):
        return {from_plain(arguments[0], key): from_plain(arguments[1], item) for key, item in data.items()}
    if origin is tuple and arguments[-1] is not ...:
        return tuple(from_plain(one, item) for one, item in zip(arguments, data, strict=True))
    items = [from_plain(arguments[0], item) for item in data]
    return origin(items) if origin in (frozenset, set, list) else tuple(items)
