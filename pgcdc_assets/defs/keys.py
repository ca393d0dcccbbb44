"""The names under which Dagster knows one source: asset keys, jobs, ops, partition sets, resources. All of these names
contain the name of the source, so that one Dagster instance can contain any number of sources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain

import dagster as dg

from pgcdc_assets.core.names import TableName

_PLAIN = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*")
_KEPT_ASCII = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-. ")

SOURCE_TAG = "pgcdc/source"
"""The tag of every run of pgcdc in Dagster. Its value is the name of the source."""


@dataclass(frozen=True)
class Names:
    source: str
    """The name of the source: letters, digits and ``_``."""
    prefix: tuple[str, ...] = ()
    """Parts before the source's name in every asset key."""

    def key(self, *parts: str) -> dg.AssetKey:
        return dg.AssetKey([*self.prefix, self.source, *parts])

    @property
    def slot(self) -> dg.AssetKey:
        return self.key("slot")

    @property
    def change_log(self) -> dg.AssetKey:
        return self.key("change_log")

    @property
    def messages(self) -> dg.AssetKey:
        return self.key("messages")

    @property
    def consistent_points(self) -> dg.AssetKey:
        return self.key("consistent_points")

    def source_table(self, table: TableName) -> dg.AssetKey:
        """The table in PostgreSQL, as an external asset."""
        return self.key("source", readable(table.schema), readable(table.name))

    def of_stage(self, stage: str, table: TableName) -> dg.AssetKey:
        """``<source>/<schema>/<table>`` for a mirror, ``<source>/<stage>/<schema>/<table>`` for the stages ``snapshot``
        and ``changes``. The numbers of parts differ, so no two keys are equal, even if a schema has the name of a
        stage."""
        parts = readable(table.schema), readable(table.name)
        return self.key(*parts) if stage == "mirror" else self.key(stage, *parts)

    @property
    def lsn_ranges(self) -> dg.DynamicPartitionsDefinition:
        return dg.DynamicPartitionsDefinition(name=self.of("lsn_ranges"))

    @property
    def snapshot_ranges(self) -> dg.DynamicPartitionsDefinition:
        return dg.DynamicPartitionsDefinition(name=self.of("snapshot_ranges"))

    @property
    def owner(self) -> str:
        """The partition set whose only key names the project (slot and system) that owns the source's other partition
        sets."""
        return self.of("owner")

    @property
    def sync_job(self) -> str:
        return self.of("sync")

    @property
    def repair_job(self) -> str:
        return self.of("repair")

    @property
    def maintain_job(self) -> str:
        return self.of("maintain")

    @property
    def verify_job(self) -> str:
        return self.of("verify")

    @property
    def jobs(self) -> Sequence[str]:
        """The jobs that write to the lake."""
        return self.sync_job, self.repair_job, self.maintain_job

    @property
    def engines(self) -> str:
        """The key of the resource that creates engines."""
        return self.of("engines")

    @property
    def pyspark(self) -> str:
        """The key of the resource that is the Spark session."""
        return self.of("pyspark")

    @property
    def watcher(self) -> str:
        """The key of the resource that receives a run's reports in addition to Dagster."""
        return self.of("watcher")

    @property
    def lake(self) -> str:
        """The key of the resource that reads the lake for a project's own assets."""
        return self.of("lake")

    @property
    def pool(self) -> str:
        """The pool of every op that writes. The pool has one slot, so one such op runs at a time."""
        return self.of("lake")

    @property
    def tags(self) -> dict[str, str]:
        return {SOURCE_TAG: self.source}

    def of(self, thing: str) -> str:
        return f"{self.source}_{thing}"


def readable(part: str) -> str:
    """A name of a schema or table, as one part of an asset key. Different names give different parts.

    The UI puts keys into paths, selections and patterns. Characters that have a meaning in them (``/``, ``*``, quotes,
    ...) are written as ``~<hex>~``. Letters of any script stay as they are.
    """
    if part in (".", ".."):
        return "".join(f"~{ord(letter):x}~" for letter in part)
    kept = {letter for letter in part if letter in _KEPT_ASCII or (not letter.isascii() and letter.isprintable())}
    return "".join(letter if letter in kept else f"~{ord(letter):x}~" for letter in part)


def op_name(kind: str, table: TableName) -> str:
    """A name for an op's output or input, made of letters, digits and ``_``. Different tables give different names.

    Plain names are spelled out. Other names get a digest after an upper-case ``X``, which no plain name contains.
    """
    if _PLAIN.fullmatch(table.schema) and _PLAIN.fullmatch(table.name):
        return f"{kind}__{table.schema}__{table.name}"
    slug = "_".join(chain.from_iterable(re.findall(r"[A-Za-z0-9]+", part) for part in (table.schema, table.name)))
    digest = sha256(f"{table.schema}\0{table.name}".encode()).hexdigest()[:16]
    return f"{kind}__{slug[:60]}__X{digest}"
