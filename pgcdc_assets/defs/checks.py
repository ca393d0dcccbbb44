"""Health as asset checks on the slot and on every mirror, and the slot as an observable asset."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets.defs import metadata
from pgcdc_assets.defs.dagsterinternals import passed_checks
from pgcdc_assets.defs.partitions import DELETE
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.project import load_catalog

if TYPE_CHECKING:
    from pgcdc_assets.checks.health import Problem, TableFacts
    from pgcdc_assets.checks.status import Status

SLOT_CHECK = "healthy"
MIRROR_CHECK = "followed"


def slot_asset(of: Replication) -> dg.AssetsDefinition:
    """The slot as an observable asset. It is created from a spec, so a project can change it like the other assets."""
    spec = dg.AssetSpec(
        of.names.slot,
        group_name=of.names.source,
        kinds={"postgres"},
        description="The replication slot on the source: its positions, and the WAL that it keeps.",
    )

    @dg.multi_observable_source_asset(name=of.names.of("slot"), specs=[spec])  # type: ignore[untyped-decorator]
    def slot(context: dg.AssetExecutionContext) -> dg.ObserveResult:
        found = of_slot(current_health(of, context.instance))
        return dg.ObserveResult(asset_key=context.asset_key, metadata=found)

    asset: dg.AssetsDefinition = slot
    return asset


def current_health(of: Replication, instance: dg.DagsterInstance) -> "Status":
    """The project's status, with the problems of this instance's partition keys added."""
    from pgcdc_assets.checks.health import Problem
    from pgcdc_assets.checks.problemcodes import ProblemCode
    from pgcdc_assets.checks.status import refused, status
    from pgcdc_assets.errors import SettingsError, StoreFailed

    try:
        found = status(of.settings)
    except (SettingsError, StoreFailed) as error:
        return refused(error)
    what = "is not a range of the change log, so pgcdc ignores it"
    register = of.register(instance)
    odd = [Problem("warning", f"partition {key!r} of {register.name}", what, DELETE, ProblemCode.RANGE_KEY_ODD)
           for key in register.odd()]  # fmt: skip
    return replace(found, problems=(*found.problems, *odd))


def evaluations(of: Replication, health: "Status") -> list[dg.AssetCheckEvaluation]:
    """One evaluation per check. The text of a failed check says what is wrong and what to do.

    An error that concerns all tables (the source does not answer, the slot is lost) fails the check of every mirror,
    because no mirror follows the source in this case.
    """
    from pgcdc_assets.checks.tablehealth import FEED_OF_MESSAGES

    catalog, facts = load_catalog(of.settings.catalog_file), {table.name: table for table in health.tables}
    # If the status could not read the lake, it has no tables. The saved catalog then has their names.
    tables = list(facts) or [table.name for table in (catalog.tables if catalog else ())]
    of_table = {name: [p for p in health.problems if p.thing == f"table {name}"] for name in tables}
    rest = [p for p in health.problems if not any(p in found for found in of_table.values())]
    others = ("table ", FEED_OF_MESSAGES)
    of_all = [p for p in rest if p.severity == "error" and not p.thing.startswith(others)]
    return [
        _evaluation(of.placed(of.names.slot), SLOT_CHECK, rest, of_slot(health)),
        *(
            _evaluation(
                of.key("mirror", name), MIRROR_CHECK, [*of_table[name], *of_all],
                _of_table(facts[name], health) if name in facts else {},
            )
            for name in tables
        ),
    ]  # fmt: skip


def news(
    instance: dg.DagsterInstance, found: Sequence[dg.AssetCheckEvaluation]
) -> list[dg.AssetCheckEvaluation]:  # fmt: skip
    """The evaluations worth recording: failed checks, and passed checks whose last recorded result is not a success."""
    passed = passed_checks(instance, [one.asset_check_key for one in found])
    return [one for one in found if not (one.passed and one.asset_check_key in passed)]


def health_digest(health: "Status") -> str:
    """A digest that changes when a problem appears, disappears or gets other advice. It does not change when only the
    numbers in a problem's description change."""
    found = sorted(f"{problem.severity}|{problem.thing}|{problem.do}" for problem in health.problems)
    return sha256("\n".join(found).encode()).hexdigest()[:16]


def of_slot(health: "Status") -> metadata.Metadata:
    slot = health.slot
    positions = metadata.lsns(
        confirmed_flush_lsn=slot.confirmed_flush_lsn if slot else None,
        restart_lsn=slot.restart_lsn if slot else None,
        transform_lsn=health.transform_lsn,
        replay_lsn=health.replay_lsn,
    )
    if slot is not None and slot.wal_status is not None:
        positions["wal_status"] = dg.MetadataValue.text(slot.wal_status)
    return positions | metadata.numbers({"lag_bytes": health.lag_bytes}) | _words(health.problems)


def _of_table(table: "TableFacts", health: "Status") -> metadata.Metadata:
    words = {"state": str(table.state), **({"reason": table.reason} if table.reason else {})}
    lag = {"lag_bytes": _lag(table, health)}
    texts = {name: dg.MetadataValue.text(text) for name, text in words.items()}
    return metadata.lsns(replay_lsn=table.replay_lsn) | metadata.numbers(lag) | texts


def _lag(table: "TableFacts", health: "Status") -> int | None:
    """Bytes of WAL from the table's position to the source's flush LSN. None if the source did not answer."""
    if table.replay_lsn is None or health.replay_lsn is None or health.lag_bytes is None:
        return None
    return max(0, health.lag_bytes - (table.replay_lsn - health.replay_lsn))


def _evaluation(
    key: dg.AssetKey, name: str, problems: Sequence["Problem"], found: metadata.Metadata
) -> dg.AssetCheckEvaluation:
    errors = any(problem.severity == "error" for problem in problems)
    said = "; ".join(f"{problem.thing} {problem.what}: {problem.do}" for problem in problems)
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name=name,
        passed=not problems,
        severity=dg.AssetCheckSeverity.ERROR if errors else dg.AssetCheckSeverity.WARN,
        description=said or "nothing is wrong",
        metadata=found | _words(problems),
    )


def _words(problems: Sequence["Problem"]) -> metadata.Metadata:
    if not problems:
        return {}
    lines = [f"- **{problem.thing}** {problem.what}. _{problem.do}_" for problem in problems]
    return {"problems": dg.MetadataValue.md("\n".join(lines))}
