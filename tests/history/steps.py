"""A random history: single statements on the source, and syncs, copies and repairs between them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.history.tables import Spec, tables

CONNECTIONS = 3

_WEIGHTS = {
    "insert": 12, "update": 5, "touch": 4, "rekey": 4, "negate": 2, "swap": 4, "delete": 4, "reinsert": 3,
    "move leaf": 3, "truncate": 1, "truncate leaf": 1, "churn": 1, "message": 1, "savepoint": 2, "rollback to": 2,
    "begin": 2, "commit": 14, "rollback": 1, "prepare": 2, "finish prepared": 2, "empty": 1,
}  # fmt: skip
ACTS = {*_WEIGHTS, "commit prepared", "rollback prepared"} - {"begin", "savepoint", "empty", "finish prepared"}
"""The names under which a workload counts the steps that took effect."""
RARE = ("negate", "swap", "reinsert", "move leaf", "truncate leaf", "truncate", "churn")
_OPERATIONS = ("sync", "sync", "sync", "until", "until", "ahead", "copy", "backfill", "repair")
"""Operations of the project between steps, see :mod:`~tests.history.driver`. An operation that is listed several times
is selected more often."""


@dataclass(frozen=True)
class Step:
    """One statement of one connection. ``seed`` and ``pick`` select the rows to change, among the rows that exist when
    the step runs."""

    op: str
    connection: int
    table: int
    pick: int
    seed: int


@dataclass(frozen=True)
class Operation:
    """What the project does after a list of steps: a sync, a copy, a repair and so on."""

    kind: str
    pick: int
    batch_bytes: int
    cuts: int
    """If ``kind`` is ``sync``: the number of syncs into which the new WAL is divided."""
    beside: int
    """How many of the next steps run at the same time as the operation."""


@dataclass(frozen=True)
class History:
    tables: tuple[Spec, ...]
    before: list[Step]
    """Steps before the first copy."""
    parts: list[tuple[list[Step], Operation]]
    encoding: str = "UTF8"


def _steps(**more: int) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        op=st.sampled_from([op for op, weight in {**_WEIGHTS, **more}.items() for _ in range(weight)]),
        connection=st.integers(0, CONNECTIONS - 1),
        table=st.integers(0, 4),
        pick=st.integers(0, 11),
        seed=st.integers(0, 1 << 16),
    )


STEPS = _steps()
_LONG_STEPS = _steps(default=4)
"""Random steps like :data:`STEPS`. Some of them change default settings of the database."""
_SPECS = tables()
OPERATIONS = st.builds(
    Operation,
    kind=st.sampled_from(_OPERATIONS),
    pick=st.integers(0, 1 << 10),
    batch_bytes=st.sampled_from((1, 4_000, 100_000)),
    cuts=st.integers(1, 3),
    beside=st.sampled_from((0, 0, 0, 8)),
)


def undisturbed() -> list[Step]:
    """Steps that every history needs: each rare statement on each table, while no other connection holds a lock, and
    each way to end a transaction. A random history may lack some of these steps, even with a fixed seed: hypothesis
    also uses constants of the source code, and so generates different steps after a change of the code."""
    ended = [Step("commit", connection, 0, 0, 0) for connection in range(CONNECTIONS)]
    ended += [Step("finish prepared", 0, 0, 0, number) for number in range(3)]
    acts = [Step(op, 0, 0, 0, 0) for op in ("begin", "savepoint", "insert", "rollback to", "rollback")]
    for seed in range(4):
        acts += [Step(op, 0, 0, 0, seed) for op in ("begin", "insert", "prepare", "finish prepared")]
    for number, act in enumerate(RARE):
        for table in range(5):
            acts += [Step("insert", 0, table, 0, number), Step("insert", 0, table, 0, number + 100)]
            acts += [Step(act, 0, table, 0, number), Step("commit", 0, 0, 0, 0)]
    return [*ended, *acts]


def long_histories(parts: int, steps: int, encoding: str) -> st.SearchStrategy[History]:
    """Like :func:`histories`, but in a database of this encoding, with UNLOGGED partitions, and with steps that change
    default settings of the database."""
    return histories(parts, steps, _LONG_STEPS, tables(encoding, unlogged=True), encoding)


def histories(
    parts: int, steps: int, one: st.SearchStrategy[Step] = STEPS,
    specs: st.SearchStrategy[tuple[Spec, ...]] = _SPECS, encoding: str = "UTF8",
) -> st.SearchStrategy[History]:  # fmt: skip
    """Histories of up to ``parts`` parts. Each part has up to ``steps`` steps, and then one :class:`Operation`. The
    tables have some rows at the start.

    The simplest example is excluded: no steps between the operations, or only steps with seed 0. Hypothesis runs this
    example first, so a test with only one example would run nothing else.
    """
    first = [Step("insert", 0, table, 0, seed) for table in range(5) for seed in range(4)]
    first.append(Step("commit", 0, 0, 0, 0))
    part = st.tuples(st.lists(one, min_size=steps // 3, max_size=steps), OPERATIONS)
    return st.builds(
        History,
        tables=specs,
        before=st.lists(one, max_size=steps // 2).map(lambda more: first + more),
        parts=st.lists(part, min_size=max(parts - 1, 1), max_size=parts),
        encoding=st.just(encoding),
    ).filter(lambda history: any(step.seed for steps, _ in history.parts for step in steps))
