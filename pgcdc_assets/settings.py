"""The settings. A variable ``PGCDC_...`` of the environment takes precedence over a line of ``pgcdc.yaml`` in the
working directory, which is the project directory. Secrets are read only from the environment, a service file or a
passfile. A password in ``pgcdc.yaml`` is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import pydantic_settings
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from pgcdc_assets import projectfile
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.settingvalues import PrefixPatterns, checked_registry, is_known, is_local
from pgcdc_assets.errors import SettingsError

PREFIX = "PGCDC_"
_NOT_SETTINGS = ("ASSETS_", "TEST_", "FAULTS")
"""Variables that begin with PREFIX and one of these words are not settings. Our own processes and tests use them."""
OWN_NAME = "pgcdc"
STATE_FOLDER = Path(".pgcdc")
"""The default of the setting ``state``: a folder of the project directory."""

MASTER, ARCHIVE = "master", "archive"
"""Keys of the setting ``spark`` that are not settings of Spark itself."""
SPARK_MASTER = "spark.master"
"""Spark's own name for the master. It is refused as a key of the setting ``spark``, because the key ``master`` has the
same meaning: if the file had one of the keys, and the environment the other, neither would take precedence."""
LOCAL_MASTER = "local[*]"

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+)\s*([A-Za-z]*)")
_LONGEST_RETENTION = timedelta(days=36_500)
"""The longest retention, a hundred years. With a longer retention, pgcdc could compute dates that Python cannot
represent."""
_NAME = re.compile(r"(?=.{1,40}$)[a-z][a-z0-9]*(_[a-z0-9]+)*")
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
_URL = re.compile(r"\w+:/")
_OBJECT_STORE = re.compile(r"(s3|gs)://[^/@:?#]+(/.*)?|abfss://[^/@:?#]+@[^/@:?#]+(/.*)?")
_URLS = "s3://bucket/folder, gs://bucket/folder or abfss://container@account.dfs.core.windows.net/folder"
_ODD_IN_KEY = re.compile(r"[\\%?#\x00-\x1f]|//|/\.{1,2}(/|$)")
"""Characters and parts of a path that some programs that read the lake interpret in different ways."""
_UNOPENED = re.compile(r"\\|%[0-9A-Fa-f]{2}")
"""delta-rs interprets these characters as parts of a URL, and then finds no table."""


def _size(value: Any) -> Any:
    """Converts a text such as ``256MiB`` to a number of bytes."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write it like 256MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def _days(value: Any, otherwise: ValidatorFunctionWrapHandler) -> timedelta:
    """Converts a text such as ``7 days`` or ``12 hours`` to a timedelta. ISO 8601 durations are left to pydantic."""
    try:
        if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*(day|hour|minute)s?", value.strip())):
            found = timedelta(**{match[2] + "s": int(match[1])})
        else:
            found = otherwise(value)
    except (ValidationError, OverflowError):
        found = timedelta(-1)
    if not timedelta(0) <= found <= _LONGEST_RETENTION:
        raise ValueError(
            f"{value!r} is not a duration from 0 to {_LONGEST_RETENTION.days} days; write it like 7 days, 12 hours or "
            "30 minutes"
        )
    return found


def _spark_text(value: Any) -> str:
    """Converts a value to text for Spark's configuration. YAML's ``true`` becomes ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _object_store(url: str) -> str:
    """The URL of a lake, without a slash at its end. No message quotes the URL, because it may contain a secret."""
    if not _OBJECT_STORE.fullmatch(url):
        raise ValueError(f"is neither a folder on this machine nor a URL like {_URLS}; put credentials into the "
                         "environment, not into the URL")  # fmt: skip
    url = url.rstrip("/")
    if odd := _ODD_IN_KEY.search(url.partition("://")[2]):
        raise ValueError(f"has {odd[0]!r} in its path, and some programs cannot open tables there; choose another path")
    return url


def _refuse_shared_folder(lake: str) -> None:
    """Raise ValueError for a folder that is or contains the project's folder or the user's home, because ``pgcdc
    teardown --lake`` deletes the lake."""
    if not lake:
        raise ValueError("is empty; give a folder, for example ./lake")
    place = os.path.realpath(lake)
    for folder, whose in ((os.getcwd(), "the project's folder"), (os.path.expanduser("~"), "your home")):
        if Path(os.path.realpath(folder)).is_relative_to(place):
            raise ValueError(f"{place} is {whose}, or contains it; use a separate folder, for example ./lake")


Size = Annotated[int, BeforeValidator(_size), Field(gt=0)]
Retention = Annotated[timedelta, WrapValidator(_days)]


def _own_name(given: dict[str, Any]) -> str:
    """The default of ``slot`` and ``publication``. It contains the source's name, because a slot's name must be unique
    in the whole server, even if two sources are databases of one server."""
    name = given.get("name", OWN_NAME)
    return OWN_NAME if name == OWN_NAME else f"{OWN_NAME}_{name}"


class Settings(BaseSettings):
    """The settings as one typed object. docs/reference/settings.md shows the text of each field."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True,
                                      hide_input_in_errors=True)  # fmt: skip

    name: str = OWN_NAME
    """The source's name in Dagster. All keys of assets, jobs and partition sets begin with this name. Two projects in
    one Dagster instance need two names."""
    source: str | None = None
    """The database: a libpq conninfo or URL, or ``embedded`` for an embedded server with a sample shop. ``pgcdc setup``
    writes it into ``pgcdc.yaml``. A password in ``pgcdc.yaml`` is refused: use ``PGPASSWORD``, a service file or
    ``~/.pgpass``."""
    lake: Path | str = Path("lake")
    """The folder of the mirrors: a folder on this machine, or the URL of a folder in an object store. A folder on this
    machine may not be or contain the project's folder or your home."""
    lake_shared: bool = False
    """Whether the executors of a Spark cluster see the lake's folder under the same path as the driver."""
    slot: str = Field(default_factory=_own_name)
    """The replication slot. ``pgcdc setup`` creates it unless it exists."""
    publication: str = Field(default_factory=_own_name)
    """The publication. ``pgcdc setup`` creates it unless it exists. Tables without a usable replica identity are
    published for inserts only, in ``<publication>_inserts``."""
    tables: tuple[str, ...] = ()
    """The tables to mirror, as patterns ``schema.table``. ``*`` and ``?`` are allowed, a leading ``-`` excludes.
    Without patterns, all permanent tables are mirrored."""
    messages: tuple[str, ...] = ()
    """The logical messages to record, as patterns for their prefixes. ``*`` and ``?`` are allowed, a leading ``-``
    excludes, and a pattern in double quotes is compared verbatim. Without patterns, no messages are recorded."""
    origin: Literal["any", "none"] = "any"
    """Which transactions are mirrored. With ``any``, all transactions. With ``none``, only transactions that were
    written on the source itself, and not transactions that it received by replication."""
    streaming: Literal["auto", "off"] = "auto"
    """When large transactions are received. With ``auto``, before their commit, if the server can send them. With
    ``off``, after their commit."""
    two_phase: bool = False
    """Whether the source sends prepared transactions at their PREPARE. The slot must have been created with the same
    value. With either value, mirrors get the changes after the COMMIT PREPARED."""
    schema_changes: Literal["rewrite", "metadata", "set_aside"] = "rewrite"
    """What happens to a mirror when its table's structure changes. With ``rewrite``, the mirror's rows are written
    again with the new structure. If their new values are not known, the table is copied again. With ``metadata``, rows
    are not rewritten if Delta's column mapping and type widening can express the change. Fewer programs can read such
    mirrors. With ``set_aside``, pgcdc stops following the table until you run ``pgcdc snapshot``, with two exceptions.
    New and removed partitions are handled as with ``rewrite``. In a table with a key, a new column that is NULL in
    older rows is added with the table's next change."""
    recopy_bytes: Size = 10 << 30
    """The largest table that pgcdc copies again by itself. If a change of structure requires a new copy of a larger
    table, pgcdc stops following the table until you run ``pgcdc snapshot``."""
    spark: dict[str, str] = Field(default_factory=lambda: {MASTER: LOCAL_MASTER})
    """The settings of Spark: ``master``, ``archive`` (from ``pgcdc pack``, for the executors of a cluster), and any
    ``spark.*`` setting."""
    registry: Annotated[dict[str, str], AfterValidator(checked_registry)] | None = None
    """The catalog of query engines in which mirrors are registered: Unity Catalog, Glue or a Hive metastore."""
    range_bytes: Size = 256 << 20
    """The bytes of changes after which an LSN range (a partition in Dagster) ends."""
    range_seconds: float = Field(default=60, gt=0)
    """The time after which an LSN range ends. A running sync also checks the source's catalog this often."""
    batch_bytes: Size = 32 << 20
    """The size at which a batch of changes is committed to the change log."""
    batch_seconds: float = Field(default=1, gt=0)
    """The least time between two batches, which are commits to the change log. A batch that reaches ``batch_bytes`` is
    committed earlier. The first change after a quiet time is committed at once."""
    drain_bytes: Size = 32 << 20
    """A backlog of at least this much WAL is read with SQL functions, which are faster than the stream. This needs a
    free replication slot and a connection without TLS. Otherwise the backlog is streamed."""
    idle_seconds: float = Field(default=30, ge=0)
    """A run that the sensor started ends after this time without changes."""
    run_seconds: float = Field(default=1800, gt=0)
    """A run that the sensor started ends after this time. The sensor then starts the next run."""
    sensor_seconds: int = Field(default=5, ge=1)
    """How often the sensor checks whether there is something to do. Dagster's daemon checks sensors at most every 5
    seconds."""
    retention: Retention = timedelta(days=7)
    """How long changes and consistent points are kept. ``pgcdc repair`` and ``Lake.at`` can go back that far. Changes
    that a followed mirror still needs are kept longer. Points are kept for 15 days at most."""
    log_format: Literal["text", "json"] = "text"
    """The form of the lines on stderr. The option ``--log-format`` of a command takes precedence."""
    state: Path = STATE_FOLDER
    """The folder on this machine for the project's saved catalog, a record of its lake and slot, its logs, and the
    embedded server."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, projectfile.content())

    @field_validator("spark", mode="before")
    @classmethod
    def _spark_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"master": value}
        if isinstance(value, dict):
            odd = [key for key in value if key not in (MASTER, ARCHIVE) and not str(key).startswith("spark.")]
            if odd:
                raise ValueError(
                    f"has the key {odd[0]!r}, which is neither `{MASTER}`, `{ARCHIVE}` nor a `spark.*` setting"
                )
            if SPARK_MASTER in value:
                raise ValueError(f"has the key `{SPARK_MASTER}`; write `{MASTER}` instead")
            return {MASTER: LOCAL_MASTER, **{key: _spark_text(item) for key, item in value.items()}}
        return value

    @field_validator("spark")
    @classmethod
    def _spark_place(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        master, lake = value[MASTER], info.data.get("lake")
        if not is_known(master):
            # The message does not quote the given text, because the text may contain a token.
            raise ValueError(
                "names an unknown master; use local[N], spark://HOST:PORT, yarn or k8s://URL; N is * or at least 1"
            )
        if is_local(master):
            if ARCHIVE in value:
                raise ValueError(
                    f"`{ARCHIVE}` is for the executors of a cluster, and the master {master} has none; remove it"
                )
        elif isinstance(lake, Path) and not info.data.get("lake_shared"):
            # Executors on other machines would write the files to their own disks.
            raise ValueError(
                f"executors of {master} cannot be used with a lake on a local path ({lake}); set `lake` to a URL like "
                "s3://bucket/folder, or `lake_shared: true` if driver and executors see that folder under the same path"
            )
        archive = value.get(ARCHIVE, "")
        if archive and not _URL.match(archive) and not Path(archive).is_file():
            raise ValueError(f"there is no archive {Path(archive).absolute()}; make it with `pgcdc pack`")
        return value

    @field_validator("source")
    @classmethod
    def _source_form(cls, value: str | None) -> str | None:
        if value is not None and value != projectfile.EMBEDDED:
            try:
                given = conninfo_to_dict(value)
            except ProgrammingError:
                # libpq's own message would quote the given text, with the password.
                raise ValueError(f"{projectfile.NO_SOURCE}; {projectfile.SOURCE_FORM}") from None
            if not set(str(given.get("port", ""))) <= set("0123456789,"):
                raise ValueError("has a port that is not a number")
            if "://" in value and "@" in f"{given.get('host', '')}{given.get('dbname', '')}":
                # Otherwise a part of the password would be taken for a host or database, and shown in errors.
                raise ValueError("has an `@` in its host or database; write @ and / of a password as %40 and %2F")
            if "replication" in given:
                # Only some of our connections are replication connections.
                raise ValueError(
                    "sets `replication`, which pgcdc sets for each connection itself; remove it from `source`"
                )
        return value

    @field_validator("lake", mode="before")
    @classmethod
    def _lake_form(cls, value: Any) -> Any:
        if isinstance(value, str) and _URL.match(value):
            return _object_store(value)
        if str(value).startswith("~"):
            raise ValueError("begins with ~, which is not expanded; write the whole path")
        if not isinstance(value, (str, Path)):
            return value
        path = Path(value).absolute()
        if odd := _UNOPENED.search(str(path)):
            raise ValueError(
                f"no Delta table can be opened in {path}, because the path contains {odd[0]!r}; use another path"
            )
        if in_the_way := next((one for one in (path, *path.parents) if os.path.isfile(one)), None):
            raise ValueError(f"{in_the_way} is a file; give a folder")
        _refuse_shared_folder(str(value))
        return Path(value)

    @field_validator("name")
    @classmethod
    def _name_form(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                "a source's name has 1 to 40 characters from a-z, 0-9 and single _, and begins with a letter"
            )
        return value

    @field_validator("slot")
    @classmethod
    def _slot_form(cls, value: str) -> str:
        if not _SLOT_NAME.fullmatch(value):
            raise ValueError("a slot name has 1 to 63 characters from a-z, 0-9 and _")
        return value

    @field_validator("tables", "messages", mode="before")
    @classmethod
    def _patterns_form(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            of = " for message prefixes" if name == "messages" else ""
            raise ValueError(f"must be a list of patterns{of}; write it like {_EXAMPLES[name]}")
        if name == "messages":
            PrefixPatterns.parse(value)
        return value

    @field_validator("origin", "streaming", mode="before")
    @classmethod
    def _word_form(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if name == "streaming" and value is False:
            # YAML reads `off` without quotes as False, so False is turned back into `off`.
            return "off"
        one, other = get_args(cls.model_fields[name].annotation)
        if value not in (one, other):
            raise ValueError(f"{value!r} is neither `{one}` nor `{other}`")
        return value

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Read the settings. Values in ``given`` override environment and file. Raises SettingsError, which names the
        field and never quotes a value, because the value may be secret."""
        try:
            return cls(**given)
        except ValidationError as error:
            raise _wrong(dict(error.errors(include_input=False, include_url=False)[0])) from None
        except pydantic_settings.SettingsError as error:
            # The setting is a list or a map, and the value of its environment variable is not valid JSON. The library's
            # message names the setting, and does not quote the value.
            named = re.search(r'field "(\w+)"', str(error))
            name = named[1] if named else "settings"
            example = _EXAMPLES.get(name, "...")
            raise SettingsError(
                f"the variable {PREFIX}{name.upper()} does not contain JSON", thing=f"setting `{name}`",
                do=f"write it like {PREFIX}{name.upper()}='{example}'",
            ) from None  # fmt: skip

    @classmethod
    def of(cls, **given: Any) -> Settings:
        """Settings from these values alone: neither environment nor ``pgcdc.yaml`` is read. Raises SettingsError."""
        return _Given.load(**given)

    def changed(self, **given: Any) -> Self:
        """The same settings with other values for these fields. Raises SettingsError."""
        return self.load(**{name: getattr(self, name) for name in type(self).model_fields} | given)

    @property
    def embedded(self) -> bool:
        return self.source == projectfile.EMBEDDED

    @property
    def master(self) -> str:
        return self.spark[MASTER]

    @property
    def layout(self) -> Layout:
        return Layout.of(self.lake)

    @property
    def catalog_file(self) -> Path:
        """The file with the source's catalog, as setup or sync last read it."""
        return self.state / "catalog.json"

    @property
    def run_log(self) -> Path:
        """The file with the output of Java and of libraries while a command runs."""
        return self.state / "run.log"


class _Given(Settings):
    """See :meth:`Settings.of`."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: Any, **more: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


_EXAMPLES = {
    "tables": '["public.*", "-public.audit_*"]',
    "messages": '["outbox.*", "app"]',
    "spark": '{"master": "local[4]"}',
    "registry": '{"unity": "https://unity.example.org", "catalog": "shop"}',
}


_NO_TEXT = ("string_type", "path_type")
"""pydantic's error types for a value that is not text, such as the number that YAML reads in ``slot: 123``."""


def _wrong(error: Mapping[str, Any]) -> SettingsError:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    if error["type"] == "extra_forbidden":
        close = get_close_matches(name, Settings.model_fields, 1)
        do = f"did you mean `{close[0]}`?" if close else "docs/reference/settings.md lists all settings"
        return SettingsError("is unknown", thing=f"setting `{name}`", do=do)
    if error["type"] in _NO_TEXT:
        return SettingsError("must be text", thing=f"setting `{name}`", do=f'write it in quotes, like {name}: "123"')
    what = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    return SettingsError(what.removesuffix(", unable to interpret input"), thing=f"setting `{name}`")


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each environment variable that looks like a setting but is not, and so is probably misspelled."""
    known = {name.upper() for name in Settings.model_fields}
    found = [name for name in sorted(environment) if name.upper().startswith(PREFIX)]
    lines = []
    for name in found:
        rest = name.upper().removeprefix(PREFIX)
        if rest not in known and not rest.startswith(_NOT_SETTINGS):
            close = get_close_matches(rest, known, 1)
            lines.append(f"{name} is not a setting" + (f"; did you mean {PREFIX}{close[0]}?" if close else ""))
    return lines
