"""Reports the last failure of each kind of operation, until an operation of that kind succeeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pgcdc_assets.checks.problem import Problem, Severity
from pgcdc_assets.flow.outcomes import Failure, OperationKind, Outcome


def of_outcomes(outcomes: Mapping[str, Outcome]) -> Iterator[Problem]:
    """A problem for each kind of operation whose last run failed. A failed sync is an error, because the lake does not
    follow the source. Any other failed operation is a warning."""
    for kind, outcome in outcomes.items():
        if outcome.failed is not None:
            severity: Severity = "error" if kind == OperationKind.SYNC else "warning"
            yield Problem(severity, f"last {kind}", _words(outcome.failed), outcome.failed.do)


def _words(failed: Failure) -> str:
    what = f"{failed.thing}: {failed.what}" if failed.thing else failed.what
    where = f", at LSN {failed.lsn}" if failed.lsn else ""
    return f"(`pgcdc {failed.command}`, {failed.at:%Y-%m-%d %H:%M:%S} UTC) failed: {what}{where}"
