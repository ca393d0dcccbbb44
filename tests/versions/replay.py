"""The log played back without Spark: decoded by the project's decoder, applied row by row in plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.protocol.columns import images
from pgcdc_assets.protocol.messages import UNCHANGED
from pgcdc_assets.protocol.shape import Shape
from pgcdc_assets.protocol.text.types import cast
from tests.log.conftest import rows
from tests.oracle import Rows, _written

Row = dict[str, Any]


def played(log: ChangeLog, upto: Lsn) -> dict[str, list[Row]]:
    """Rows by table (schema.table; leaves count to their root) once all that commits below ``upto`` is applied.

    The tables were empty where the log begins.
    """
    shapes = log.shapes(LsnRange(log.start, log.position()))
    state: defaultdict[int, list[Row]] = defaultdict(list)
    changes = rows(log, f"kind IN ('I', 'U', 'D', 'T') AND commit_lsn < {int(upto)}")
    decoded = _decoded(changes, shapes)
    for at, change in enumerate(changes):
        held = state[change["relation_id"]]
        if change["kind"] == "T":
            held.clear()
        else:
            _apply(held, change["kind"], decoded[at], shapes[change["schema_id"]])
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for mirror, relation_id in {(shape.root or shape.table, shape.relation_id) for shape in shapes.values()}:
        found[f"{mirror.schema}.{mirror.name}"] += state[relation_id]
    return found


def as_rows(held: list[Row], columns: list[str]) -> Rows:
    """As ``tests.oracle`` has the source's. A column that a row never had is NULL."""
    return Counter(tuple(_text(row.get(column)) for column in columns) for row in held)


def _text(value: Any) -> str | None:
    return None if value is None else _written(value)


def _decoded(changes: list[dict[str, Any]], shapes: dict[int, Shape]) -> dict[int, dict[str, Row]]:
    """By place: the images of a change (K, O, N), each as column to value; absent columns are left out."""
    groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for at, change in enumerate(changes):
        if change["kind"] != "T":
            groups[change["kind"], change["schema_id"]].append(at)
    found: defaultdict[int, dict[str, Row]] = defaultdict(dict)
    for (kind, schema_id), places in groups.items():
        shape = shapes[schema_id]
        payload = pa.array([changes[at]["payload"] for at in places], pa.binary())
        for item in images(payload, kind, len(shape.columns)):  # type: ignore[arg-type]
            columns = [list(_column(item.text[i], item.unchanged[i], c.type)) for i, c in enumerate(shape.columns)]
            for number, place in enumerate(item.rows.tolist()):
                carried = [i for i, column in enumerate(shape.columns) if item.image != "K" or column.key]
                found[places[place]][item.image] = {shape.columns[i].name: columns[i][number] for i in carried}
    return found


def _column(text: pa.StringArray, unchanged: Any, of: Any) -> Iterator[Any]:
    done = cast(text, of)
    values, raw = done.values.to_pylist(), text.to_pylist()
    for at, value in enumerate(values):
        if unchanged is not None and unchanged[at]:
            yield UNCHANGED
        else:
            yield raw[at] if done.unfit is not None and done.unfit[at] else value


def _apply(held: list[Row], kind: str, change: dict[str, Row], shape: Shape) -> None:
    new, before = change.get("N"), {}
    if kind != "I":
        old = change.get("O") or change.get("K") or new
        assert old is not None
        place = _place(held, old, shape)
        assert place is not None, f"{shape.table} holds no row that a message of kind {kind} means"
        before = held.pop(place)
    if new is not None:
        held.append({name: before[name] if value is UNCHANGED else value for name, value in new.items()})


def _place(held: list[Row], image: Row, shape: Shape) -> int | None:
    """Where the row stands that the image means: by key, else by all that the image carries."""
    names = shape.key or tuple(name for name, value in image.items() if value is not UNCHANGED)
    wanted = [_text(image[name]) for name in names]
    places = (at for at, row in enumerate(held) if [_text(row.get(name)) for name in names] == wanted)
    return next(places, None)
