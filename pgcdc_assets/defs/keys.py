"""Turns names of tables into names for Dagster: readable asset keys, and op outputs that never collide."""

from __future__ import annotations

import re
from hashlib import sha256
from itertools import chain

import dagster as dg

from pgcdc_assets.core.names import TableName

SLOT = dg.AssetKey("slot")
CHANGE_LOG = dg.AssetKey("change_log")
MESSAGES = dg.AssetKey("messages")
CONSISTENT_POINTS = dg.AssetKey("consistent_points")

_PLAIN = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*")
_KEPT_ASCII = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-. ")


def mirror_key(table: TableName) -> dg.AssetKey:
    """``<schema>/<table>``. It has two parts, so it never equals a key of another kind."""
    return dg.AssetKey([readable(table.schema), readable(table.name)])


def changes_key(table: TableName) -> dg.AssetKey:
    return mirror_key(table).with_prefix("changes")


def snapshot_key(table: TableName) -> dg.AssetKey:
    return mirror_key(table).with_prefix("snapshot")


def readable(part: str) -> str:
    """A name as one part of an asset key. Different names give different parts.

    The UI puts keys into paths, selections and patterns. Characters that are syntax there (``/``, ``*``, quotes, ...)
    are written as ``~<hex>~``. Letters of any script stay as they are.
    """
    if part in (".", ".."):
        return "".join(f"~{ord(letter):x}~" for letter in part)
    return "".join(letter if _kept(letter) else f"~{ord(letter):x}~" for letter in part)


def _kept(letter: str) -> bool:
    return letter in _KEPT_ASCII or (not letter.isascii() and letter.isprintable())


def op_name(kind: str, table: TableName) -> str:
    """A name for an op's output or input, made of letters, digits and ``_``. Different tables give different names.

    Plain names are spelled out. Other names get a digest after an upper-case ``X``, which no plain name contains.
    """
    if _PLAIN.fullmatch(table.schema) and _PLAIN.fullmatch(table.name):
        return f"{kind}__{table.schema}__{table.name}"
    slug = "_".join(chain.from_iterable(re.findall(r"[A-Za-z0-9]+", part) for part in (table.schema, table.name)))
    digest = sha256(f"{table.schema}\0{table.name}".encode()).hexdigest()[:16]
    return f"{kind}__{slug[:60]}__X{digest}"
