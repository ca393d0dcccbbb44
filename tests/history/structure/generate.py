"""Generates a random history of DDL, writes and syncs from a seed.

A history has a kind of publication, some tables, and a list of steps. A family is a set of tables of one form, see
``FAMILIES`` in ``source.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.history.structure.changes import CHANGES
from tests.history.structure.source import FAMILIES
from tests.history.structure.writes import ODD_TEXTS

CONNECTIONS = 2
SCOPES = ("tables", "all", "schema")
"""Kinds of publications: FOR TABLE as setup creates it, FOR ALL TABLES, FOR TABLES IN SCHEMA."""
_TREES = ("savepoint", "savepoint", "rollback to", "release")
_BETWEEN = ("same", "same", "commits", "commits", "runs")
"""What separates a schema change, the writes after it, and its undo: nothing, commits, or syncs."""

_OF_FAMILIES = {
    "parts": ("attach", "detach", "detach concurrently", "new partition"),
    "typed": ("rename value", "add attribute", "drop attribute"),
    "made": ("drop expression",),
    "wide": ("add key",),
    "even": ("add constant", "make anew", "drop one", "other text"),
    "bag": (),
}
"""Schema changes that are possible only for tables of these families."""
_ON_COLUMNS = (
    "add constant", "add constant", "add constant", "make anew", "make anew", "drop one", "other text",
    "rename column", "rename column", "swap columns", "add column", "drop column", "alter type", "truncate",
    "vacuum full", "new partition", "attach", "detach",
)  # fmt: skip
"""The schema changes of :func:`columns_history`. A schema change that is listed several times is selected more
often."""
OF_COLUMNS = frozenset(_OF_FAMILIES["even"])
"""Schema changes that only :func:`columns_history` uses."""
_PARTED = ("even", "bag")
"""Families of tables that only :func:`columns_history` uses."""
_LONG = ("unlogged partition", "leave out", "revoke", "grant", "change default") * 2
"""Schema changes that only long histories use."""


@dataclass(frozen=True)
class Step:
    """``op``: the name of a schema change, of a write, or of another action (such as a commit or savepoint) that
    :class:`~.steprunner.StepRunner` knows. ``seed`` and the current tables determine what the step changes.
    ``sequence``: the number of the group of steps that belong together, such as a schema change and its undo."""

    op: str
    seed: int
    connection: int = 0
    sequence: int = 0


@dataclass(frozen=True)
class Kind:
    """The properties that are the same for all histories played together in one database, such as the kind of
    publication."""

    scope: str
    via_root: bool
    following: bool
    """Whether a sync in follow mode runs during the steps. Otherwise each sync ends before the next step."""
    encoding: str = "UTF8"
    few: bool = False
    """Whether the role with which pgcdc connects needs a GRANT to read a table. New tables lack this GRANT."""

    def __str__(self) -> str:
        kinds = {"tables": "FOR TABLE, as setup makes it", "all": "FOR ALL TABLES", "schema": "FOR TABLES IN SCHEMA"}
        return (f"{kinds[self.scope]}{' via root' * self.via_root}{', following' * self.following}"
                f", {self.encoding}{', few rights' * self.few}")  # fmt: skip

    @classmethod
    def of(cls, seed: int, *, long: bool = False) -> Kind:
        chance = random.Random(f"kind {seed}")
        scope = SCOPES[seed % len(SCOPES)]
        via_root, following = chance.random() < 0.6 and scope != "tables", chance.random() < 0.3
        if not long:
            return cls(scope, via_root, following)
        encoding, few = chance.choice(("UTF8", *sorted(ODD_TEXTS))), chance.random() < 0.6 and scope != "tables"
        return cls(scope, via_root, following, encoding, few)


@dataclass(frozen=True)
class History:
    seed: int
    scope: str
    families: tuple[str, ...]
    parts: tuple[tuple[Step, ...], ...]
    """The steps before each sync."""

    def without(self, part: int, steps: Collection[int]) -> History:
        """The history without some steps of one part. The number of syncs does not change."""
        rest = tuple(step for number, step in enumerate(self.parts[part]) if number not in steps)
        return replace(self, parts=(*self.parts[:part], rest, *self.parts[part + 1 :]))


def history(
    seed: int, scope: str, *, parts: int, sequences: int, changes: Sequence[str] = (), long: bool = False
) -> History:  # fmt: skip
    """A history with at least ``parts`` parts of up to ``sequences`` groups of steps each. ``changes``: if given, the
    only schema changes in the history."""
    chance = random.Random(f"story {seed}")
    others = chance.sample([name for name in FAMILIES if name not in ("plain", *_PARTED)], chance.choice((1, 1, 2)))
    usual = sorted(CHANGES.keys() - {change for of in _OF_FAMILIES.values() for change in of} - set(_LONG))
    usual += _LONG * long
    usual += [change for family in others for change in _OF_FAMILIES[family] * 2]
    return _with_steps(chance, seed, scope, ("plain", *others), changes or usual, parts=parts, sequences=sequences)


def columns_history(seed: int, scope: str, *, parts: int, sequences: int, long: bool = False) -> History:
    """Like :func:`history`, but only with column changes of partitioned tables and of tables without a key."""
    chance = random.Random(f"columns {seed}")
    families = chance.sample(("even", "bag", "wide", "parts"), chance.choice((2, 2, 3)))
    return _with_steps(
        chance, seed, scope, ("plain", *families), _ON_COLUMNS + _LONG * long, parts=parts, sequences=sequences
    )


def _with_steps(
    chance: random.Random, seed: int, scope: str, families: tuple[str, ...], changes: Sequence[str], *, parts: int,
    sequences: int,
) -> History:  # fmt: skip
    steps: list[Step] = []
    for number in range(parts * sequences):
        steps += _sequence(chance, number, changes)
        if number % sequences == sequences - 1:
            steps.append(Step("run", 0))
    ends = [number for number, step in enumerate(steps) if step.op == "run"]
    begins = [0, *(end + 1 for end in ends)]
    made = tuple(tuple(steps[begin:end]) for begin, end in zip(begins, ends, strict=False))
    return History(seed, scope, families, made)


def _sequence(chance: random.Random, number: int, changes: Sequence[str]) -> list[Step]:
    connection = chance.choice((0, 0, 0, 1))
    ops = chance.choice((_writing, _one_way, _there_and_back, _there_and_back, _tree))(chance, changes)
    return [Step(op, chance.randrange(1 << 30), connection, number) for op in ops]


def _writing(chance: random.Random, changes: Sequence[str]) -> Iterator[str]:
    yield from ("write",) * chance.randint(1, 3)
    if chance.random() < 0.8:
        yield chance.choice(("commit", "commit", "commit", "rollback"))


def _one_way(chance: random.Random, changes: Sequence[str]) -> Iterator[str]:
    yield from ("write",) * chance.randint(0, 1)
    yield chance.choice(changes)
    yield from ("write",) * chance.randint(0, 2)
    yield chance.choice(("commit", "commit", "commit", "rollback"))


def _there_and_back(chance: random.Random, changes: Sequence[str]) -> Iterator[str]:
    """A schema change, writes, and the undo of the schema change: all in one transaction, in several transactions, or
    separated by syncs."""
    between = chance.choice(_BETWEEN)
    yield from ("write",) * chance.randint(0, 1)
    yield chance.choice(changes)
    yield from _ended(chance, between)
    yield from ("write hit",) * chance.randint(1, 2)
    yield from _ended(chance, between)
    yield "back"
    yield from ("write",) * chance.randint(0, 1)
    yield "commit"


def _ended(chance: random.Random, between: str) -> Iterator[str]:
    if between != "same":
        yield "commit"
    if between == "runs" and chance.random() < 0.5:
        yield "run"


def _tree(chance: random.Random, changes: Sequence[str]) -> Iterator[str]:
    """Large writes with savepoints, some of which are rolled back. Schema changes may be among the writes."""
    yield chance.choice(("fill", "write"))
    for _ in range(chance.randint(2, 6)):
        yield chance.choice(_TREES)
        yield chance.choice(("fill", "fill", "write", "write", chance.choice(changes)))
    if chance.random() < 0.3:
        yield "rollback to"
    yield chance.choice(("commit", "commit", "rollback"))


def reduced(history: History, fails: Callable[[History], bool]) -> History:
    """Returns a shorter history that still fails. Tries to leave out steps: each try executes a history, which takes
    seconds."""
    for part in reversed(range(len(history.parts))):
        length = len(history.parts[part])
        while length:
            start = 0
            while start < len(history.parts[part]):
                shorter = history.without(part, range(start, start + length))
                if fails(shorter):
                    history = shorter
                else:
                    start += length
            length //= 2
    return history
