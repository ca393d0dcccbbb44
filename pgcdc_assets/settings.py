"""The settings: environment (``PGCDC_...``), then ``pgcdc.yaml``, then defaults.

The project directory is the working directory. Secrets come from the environment, a service file
or a passfile only: a password in ``pgcdc.yaml`` is refused.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.errors import SettingsError

SETTINGS_FILE = Path("pgcdc.yaml")
STATE_FOLDER = Path(".pgcdc")
"""Saved catalog and embedded server of a project directory."""
CATALOG_FILE = STATE_FOLDER / "catalog.json"

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+)\s*([A-Za-z]*)")
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
_URL = re.compile(r"\w+:/")
_UNOPENED = re.compile(r"\\|%[0-9A-Fa-f]{2}")
"""delta-rs reads these as parts of a URL, and finds no table."""


def _size(value: Any) -> Any:
    """``256MiB`` as a number of bytes."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write it like 256MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def _days(value: Any) -> Any:
    """``7 days``, ``12 hours`` as a timedelta; ISO 8601 durations pass through."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*(day|hour|minute)s?", value.strip())):
        return timedelta(**{match[2] + "s": int(match[1])})
    return value


Size = Annotated[int, BeforeValidator(_size), Field(gt=0)]
Retention = Annotated[timedelta, BeforeValidator(_days)]


class Settings(BaseSettings):
    """One typed object for all parts; see docs/operations.md for what each field does."""

    model_config = SettingsConfigDict(env_prefix="PGCDC_", extra="forbid", frozen=True, hide_input_in_errors=True)

    source: str | None = None
    """libpq conninfo or URL; None means the embedded server with the sample shop."""
    lake: Path = Path("lake")
    slot: str = "pgcdc"
    publication: str = "pgcdc"
    tables: tuple[str, ...] = ()
    """Patterns ``schema.table`` (``*`` and ``?`` allowed); a leading ``-`` excludes. Empty: all permanent tables."""
    spark: dict[str, str] = Field(default_factory=lambda: {"master": "local[*]"})
    """``master``, and any ``spark.*`` setting."""
    range_bytes: Size = 256 << 20
    range_seconds: float = Field(default=60, gt=0)
    batch_bytes: Size = 32 << 20
    batch_seconds: float = Field(default=1, gt=0)
    drain_bytes: Size = 32 << 20
    replication_connections: bool = True
    """Where the source takes none (a pooler, a proxy, no walsender free): ordinary sessions do, by polling."""
    idle_seconds: float = Field(default=30, ge=0)
    run_seconds: float = Field(default=1800, gt=0)
    sensor_seconds: int = Field(default=5, ge=1)
    retention: Retention = timedelta(days=7)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, SETTINGS_FILE)

    @field_validator("spark", mode="before")
    @classmethod
    def _spark_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"master": value}
        if isinstance(value, dict):
            odd = [key for key in value if key != "master" and not str(key).startswith("spark.")]
            if odd:
                raise ValueError(f"{odd[0]!r} is neither `master` nor a `spark.*` setting")
            return {"master": "local[*]", **{key: str(item) for key, item in value.items()}}
        return value

    @field_validator("lake")
    @classmethod
    def _lake_form(cls, value: Path) -> Path:
        if _URL.match(str(value)):
            raise ValueError("is a folder of this machine, not a URL")
        if odd := _UNOPENED.search(str(value.absolute())):
            raise ValueError(f"no Delta table can be opened under {value.absolute()}, for {odd[0]!r} in its path")
        return value

    @field_validator("slot")
    @classmethod
    def _slot_form(cls, value: str) -> str:
        if not _SLOT_NAME.fullmatch(value):
            raise ValueError("a slot name has 1 to 63 characters out of a-z, 0-9 and _")
        return value

    @classmethod
    def load(cls) -> Self:
        """Read them, or raise one SettingsError that names the field; never echoes a value that may be secret."""
        _refuse_secret_in_file()
        try:
            return cls()
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"]) or "settings"
            raise SettingsError(first["msg"].removeprefix("Value error, "), thing=f"setting `{name}`") from None
        except (yaml.YAMLError, OSError, ValueError) as error:
            raise SettingsError(f"cannot be read: {type(error).__name__}", thing=str(SETTINGS_FILE)) from None

    @property
    def embedded(self) -> bool:
        return self.source is None

    @property
    def layout(self) -> Layout:
        return Layout(self.lake.absolute())


def _refuse_secret_in_file() -> None:
    if not SETTINGS_FILE.is_file():
        return
    try:
        content = yaml.safe_load(SETTINGS_FILE.read_text()) or {}
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot be read: {type(error).__name__}", thing=str(SETTINGS_FILE)) from None
    if not isinstance(content, dict):
        raise SettingsError("does not hold `name: value` lines", thing=str(SETTINGS_FILE))
    source = content.get("source")
    if not isinstance(source, str):
        return
    try:
        secret = conninfo_to_dict(source).get("password")
    except ProgrammingError:
        raise SettingsError("is not a libpq conninfo or URL", thing="setting `source`") from None
    if secret:
        raise SettingsError(
            "holds a password in pgcdc.yaml",
            thing="setting `source`",
            do="put it into PGPASSWORD, PGCDC_SOURCE, a service file or a passfile",
        )
