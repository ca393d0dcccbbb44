"""The component for ``dg``: one source of a Dagster project, described in a ``defs.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import Field, TypeAdapter, ValidationError

from pgcdc_assets.defs.pipeline import build_pgcdc_defs
from pgcdc_assets.defs.replication import PgcdcTable, PgcdcTranslator
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.settings import Retention


class PgcdcScaffold(dg.Model):
    """The options of ``dg scaffold defs pgcdc_assets.PgcdcComponent``."""

    source: str = Field(
        default="{{ env.PGCDC_SOURCE }}", description="The source: a libpq conninfo or URL, or {{ env.NAME }}."
    )
    lake: str = Field(
        default="",
        description="The lake: a folder of the project, or a URL of an object store. Default: lake/<name>.",
    )


class PgcdcFreshness(dg.Model, dg.Resolvable):
    """The freshness policy of ``consistent_points``, in texts like ``15 minutes``."""

    fail: Annotated[
        str, Field(description="The policy fails if consistent_points was not updated for this time, like 15 minutes.")
    ]
    warn: Annotated[
        str | None,
        Field(description="The policy warns if consistent_points was not updated for this time, like 5 minutes."),
    ] = None

    def policy(self) -> dg.FreshnessPolicy:
        """Raises SettingsError for a text that is not a duration."""
        return dg.FreshnessPolicy.time_window(_duration(self.fail), _duration(self.warn) if self.warn else None)


def _duration(text: str) -> timedelta:
    try:
        return TypeAdapter(Retention).validate_python(text)
    except ValidationError as error:
        raise SettingsError(error.errors()[0]["msg"], thing="attribute `freshness`") from None


class PgcdcScaffolder(dg.Scaffolder[PgcdcScaffold]):
    @classmethod
    def get_scaffold_params(cls) -> type[PgcdcScaffold]:
        return PgcdcScaffold

    def scaffold(self, request: dg.ScaffoldRequest[PgcdcScaffold]) -> None:
        name = request.target_path.name.lower().replace("-", "_")
        attributes = {"name": name, "source": request.params.source, "lake": request.params.lake or f"lake/{name}"}
        dg.scaffold_component(request=request, yaml_attributes=attributes)


@dg.scaffold_with(PgcdcScaffolder)
class PgcdcComponent(dg.Component, dg.Model, dg.Resolvable):
    """Delta Lake tables kept exactly equal to one PostgreSQL database."""

    name: Annotated[
        str, Field(description="The source's name. The names of its assets and jobs in Dagster begin with it.")
    ]
    source: Annotated[str, Field(description="A libpq conninfo or URL, or a variable like {{ env.SHOP_DSN }}.")]
    lake: Annotated[str, Field(description="A folder of the project, or the URL of a folder in an object store.")]
    state: Annotated[
        str | None,
        Field(
            description="The folder on this machine for saved state and logs. Default: .pgcdc/<name> in the project."
        ),
    ] = None
    tables: Annotated[
        Sequence[str],
        Field(description="Patterns like schema.table; a leading - excludes. Default: all permanent tables."),
    ] = ()
    settings: Annotated[Mapping[str, Any], Field(description="Other settings; see docs/reference/settings.md.")] = {}
    freshness: Annotated[
        PgcdcFreshness | None,
        Field(description="How old the newest consistent point may be. Default: no freshness policy."),
    ] = None
    translation: Annotated[
        TranslationFn[PgcdcTable] | None,
        TranslationFnResolver[PgcdcTable](lambda data: {"table": data.table, "stage": data.stage}),
        Field(description="Attributes of each table's assets: key_prefix, group_name, owners, tags, ..."),
    ] = None

    def get_asset_spec(self, data: PgcdcTable) -> dg.AssetSpec:
        """The spec of one asset of a table. Override it in a subclass to change what Dagster shows."""
        spec = PgcdcTranslator().get_asset_spec(data)
        return self.translation(spec, data) if self.translation else spec

    def lake_of(self, root: Path) -> Path | str:
        """The lake's URL or whole path. A relative path in the component's file is below ``root``, the project's
        folder."""
        return self.lake if "://" in self.lake else root / self.lake

    def state_of(self, root: Path) -> Path:
        """The whole path of the folder for state that is saved on this machine. ``root``: see :meth:`lake_of`."""
        return root / (self.state or f".pgcdc/{self.name}")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        root = context.project_root
        return build_pgcdc_defs(
            self.name,
            self.source,
            self.lake_of(root),
            self.state_of(root),
            tables=self.tables,
            settings=self.settings,
            translator=_ByComponent(self),
            freshness=self.freshness.policy() if self.freshness else None,
        )


class _ByComponent(PgcdcTranslator):
    def __init__(self, component: PgcdcComponent) -> None:
        self._component = component

    def get_asset_spec(self, data: PgcdcTable) -> dg.AssetSpec:
        return self._component.get_asset_spec(data)
