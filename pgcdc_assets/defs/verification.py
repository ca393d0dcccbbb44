"""``verify`` as an asset check of each mirror: every value of the mirror is compared with the source, at one LSN."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.defs import metadata
from pgcdc_assets.defs.keys import op_name
from pgcdc_assets.defs.observer import DagsterObserver
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.defs.resources import Engines
from pgcdc_assets.defs.sync import watcher
from pgcdc_assets.project import required_catalog

if TYPE_CHECKING:
    from pgcdc_assets.checks.report import TableReport, VerifyReport
    from pgcdc_assets.core.names import TableName

VERIFY_CHECK = "equal_to_source"


def verify_checks(of: Replication, catalog: Catalog) -> dg.AssetChecksDefinition:
    """One op for all mirrors. It has no pool: a running sync makes the point for it. It does nothing in a run that
    materialises assets, because Dagster adds all checks of the assets to such a run, and reading whole tables takes
    long."""
    by_out = {op_name("mirror", table.name): table for table in catalog.tables}
    specs = {
        out: dg.AssetCheckSpec(
            VERIFY_CHECK,
            asset=of.spec("mirror", table).key,
            description="Every value equals the source's. Reads the whole table on both sides; run it by itself, or "
            f"all tables by the job {of.names.verify_job}.",
        )
        for out, table in by_out.items()
    }

    @dg.op(
        name=of.names.of("verify_mirrors"),
        ins={f"of_{out}": dg.In(dg.Nothing) for out in specs},
        out={out: dg.Out(is_required=False) for out in specs},
        required_resource_keys=of.resource_keys,
    )
    def verify(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        if context.run.asset_selection:
            context.log.info("not verified, because this run materialises assets: run the check by itself")
            return
        here = of.within(context.op_execution_context)
        selected = {key.asset_key for key in context.selected_asset_check_keys}
        chosen = [table.name for table in by_out.values() if here.key("mirror", table.name) in selected]
        for report in _verified(here, context.op_execution_context, chosen).tables:
            yield _result(here, report)

    checks: dg.AssetChecksDefinition = dg.AssetChecksDefinition.create(
        node_def=verify,
        keys_by_input_name={f"of_{out}": spec.asset_key for out, spec in specs.items()},
        check_specs_by_output_name=specs,
        can_subset=True,
    )
    return checks


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
    """A running sync makes the consistent point at the snapshot's LSN. Without a running sync, this run does."""
    from pgcdc_assets.checks.verify import verify
    from pgcdc_assets.flow.boundary import Boundary
    from pgcdc_assets.flow.decide import Bounds

    engines: Engines = getattr(context.resources, of.names.engines)
    observer = DagsterObserver(context, of, watcher(of, context))

    def sync_to(lsn: Lsn, max_seconds: float | None = None, /) -> None:
        engines.engine(of.settings, observer, "verify").sync(Bounds(lsn, max_seconds=max_seconds))

    conninfo = engines.source.started(of.settings)
    boundary = Boundary(
        of.settings, conninfo, sync_to, lambda holders: context.log.info(f"waits for {'; '.join(map(str, holders))}")
    )
    boundary.prepare()
    # The sync of `prepare` may have given renamed tables their new names.
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
