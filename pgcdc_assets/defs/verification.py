"""The op of all asset checks, and ``verify`` as a check: compares every value of a mirror with the source at one
LSN."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.defs import metadata
from pgcdc_assets.defs.checks import MIRROR_CHECK, SLOT_CHECK, current_health, evaluations
from pgcdc_assets.defs.dagsterinternals import last_evaluation
from pgcdc_assets.defs.keys import op_name
from pgcdc_assets.defs.observer import DagsterObserver
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.defs.resources import Engines
from pgcdc_assets.defs.runs import as_failures
from pgcdc_assets.defs.sync import watcher
from pgcdc_assets.project import required_catalog

if TYPE_CHECKING:
    from pgcdc_assets.checks.report import TableReport, VerifyReport
    from pgcdc_assets.core.names import TableName

VERIFY_CHECK = "equal_to_source"
_REPEATED = " (the result of the last comparison; a run that materializes assets compares nothing)"


def asset_checks(of: Replication, catalog: Catalog) -> dg.AssetChecksDefinition:
    """One op for all asset checks. With an op per check, each check would read source and lake again, in a process of
    its own.

    The op is created without Dagster's decorator, which derives the names of inputs and outputs from asset keys. The
    decorator refuses keys with special characters, and may give the same name to different keys.
    """
    specs = {
        "slot": dg.AssetCheckSpec(
            SLOT_CHECK, asset=of.names.slot, description="Checks the slot, the publication and the source's settings."
        )
    }
    for table in catalog.tables:
        specs[op_name("mirror", table.name)] = dg.AssetCheckSpec(
            MIRROR_CHECK,
            asset=of.spec("mirror", table).key,
            description="The mirror receives all changes of its table, and no other program has changed the mirror.",
        )
    specs |= verify_specs(of, catalog)

    @dg.op(
        name=of.names.of("health"),
        ins={f"of_{name}": dg.In(dg.Nothing) for name in specs},
        out={name: dg.Out(is_required=False) for name in specs},
        required_resource_keys=of.resource_keys,
    )
    def health(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        selected, here = context.selected_asset_check_keys, of.within(context.op_execution_context)
        of_health = any(key.name in (SLOT_CHECK, MIRROR_CHECK) for key in selected)
        found = evaluations(here, current_health(of, context.instance)) if of_health else []
        for evaluation in found:
            if evaluation.asset_check_key in selected:
                yield _as_result(evaluation, evaluation.description)
        yield from verification(here, context)

    checks: dg.AssetChecksDefinition = dg.AssetChecksDefinition.create(
        node_def=health,
        keys_by_input_name={f"of_{name}": spec.asset_key for name, spec in specs.items()},
        check_specs_by_output_name=specs,
        can_subset=True,
    )
    return checks


def verify_specs(of: Replication, catalog: Catalog) -> dict[str, dg.AssetCheckSpec]:
    """The checks, by the names of their outputs in the op of all checks."""
    text = (
        "Compares every value of the mirror with its table on the source, and so reads both completely. Run this check "
        f"alone, or run the job {of.names.verify_job} for all tables. A run that also materializes assets compares "
        "nothing, and only repeats the last result."
    )
    return {
        op_name("equal", table.name): dg.AssetCheckSpec(
            VERIFY_CHECK, asset=of.spec("mirror", table).key, description=text
        )
        for table in catalog.tables
    }


def verification(of: Replication, context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
    """The results of the checks that the run selects. The run does not wait for the source's pool, so a sync can run at
    the same time and make the consistent point that verify needs.

    If a run materialises assets, Dagster adds all checks of these assets to the run. Reading whole tables takes long,
    so such a run compares nothing, and only repeats the last result of each check. Without a result, Dagster would show
    the check as skipped.
    """
    selected = {key for key in context.selected_asset_check_keys if key.name == VERIFY_CHECK}
    if context.run.asset_selection:
        yield from _last_results(context.instance, selected)
    elif selected:
        catalog, keys = required_catalog(of.settings.catalog_file), {key.asset_key for key in selected}
        chosen = [table.name for table in catalog.tables if of.key("mirror", table.name) in keys]
        with as_failures():
            reports = _verified(of, context.op_execution_context, chosen).tables
        yield from (_result(of, report) for report in reports)


def _last_results(instance: dg.DagsterInstance, keys: Iterable[dg.AssetCheckKey]) -> Iterator[dg.AssetCheckResult]:
    for key in keys:
        if last := last_evaluation(instance, key):
            yield _as_result(last, f"{(last.description or '').removesuffix(_REPEATED)}{_REPEATED}")


def _as_result(found: dg.AssetCheckEvaluation, description: str | None) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=found.asset_key, check_name=found.check_name, passed=found.passed, severity=found.severity,
        description=description, metadata=found.metadata,
    )  # fmt: skip


def verify_job(of: Replication, catalog: Catalog) -> Any:
    """The job that verifies all mirrors. A project can schedule it."""
    keys = [dg.AssetCheckKey(of.spec("mirror", table).key, VERIFY_CHECK) for table in catalog.tables]
    return dg.define_asset_job(
        of.names.verify_job,
        selection=dg.AssetSelection.checks(*keys),
        tags=of.names.tags,
        description="Compares every value of all mirrors with the source.",
    )


def _verified(of: Replication, context: dg.OpExecutionContext, tables: "list[TableName]") -> "VerifyReport":
    """Verifies these tables. A running sync, or else this run, makes the consistent point at the snapshot's LSN."""
    from pgcdc_assets.checks.verify import verify
    from pgcdc_assets.flow.boundary import Boundary
    from pgcdc_assets.flow.decide import Bounds

    engines: Engines = getattr(context.resources, of.names.engines)
    observer = DagsterObserver(context, of, watcher(of, context))

    def sync_to(lsn: Lsn, max_seconds: float | None) -> None:
        engines.engine(of.settings, observer, "verify").sync(Bounds(lsn, max_seconds=max_seconds))

    conninfo = engines.source.started(of.settings)
    boundary = Boundary(
        of.settings,
        conninfo,
        sync_to,
        lambda holders: context.log.info(
            f"the snapshot waits until these transactions end: {'; '.join(map(str, holders))}"
        ),
    )
    boundary.prepare()
    # The sync that `prepare` ran may have given renamed tables their new names.
    catalog = required_catalog(of.settings.catalog_file)
    known = [name for name in tables if catalog.table(name) is not None]
    return verify(of.settings, catalog, known, boundary.reach, conninfo=conninfo, snapshot=boundary.snapshot)


def _result(of: Replication, report: "TableReport") -> dg.AssetCheckResult:
    from pgcdc_assets.checks.report import Verdict

    wrong = report.verdict in (Verdict.DIFFERS, Verdict.FAILED)
    counts = {
        "source_rows": report.source_rows,
        "mirror_rows": report.mirror_rows,
        "missing": report.missing,
        "extra": report.extra,
        "different": report.different,
    }
    found = metadata.lsns(verified_lsn=report.lsn) | (metadata.numbers(counts) if report.compared else {})
    if report.examples:
        lines = [f"- {example.kind}: {example.key} {', '.join(example.columns)}" for example in report.examples]
        found["examples"] = dg.MetadataValue.md("\n".join(lines))
    return dg.AssetCheckResult(
        asset_key=of.key("mirror", report.table),
        check_name=VERIFY_CHECK,
        passed=report.equal,
        severity=dg.AssetCheckSeverity.ERROR if wrong else dg.AssetCheckSeverity.WARN,
        description=report.reason or ("equal" if report.equal else str(report.verdict)),
        metadata=found,
    )
