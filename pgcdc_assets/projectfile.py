"""Reads and writes ``pgcdc.yaml``, the settings file of a project directory. The file must not contain secrets. Only
its ``source`` line is written, by setup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.store.localfiles import write_whole

SETTINGS_FILE = Path("pgcdc.yaml")
EMBEDDED = "embedded"
"""The value of the setting ``source`` that selects the embedded PostgreSQL with the sample shop."""
NO_SOURCE = "is not a libpq conninfo or URL"
"""The texts of errors contain this instead of libpq's own error, which would quote the conninfo with its password."""
SOURCE_FORM = "write it like `host=db.example.org dbname=shop user=replicator`, or `postgresql://replicator@db/shop`"

_FORM = "write one `name: value` per line, and put quotes around a value that contains `: ` or ` #`"
_SOURCE_LINE = re.compile(r"(?im)^source[ \t]*:.*$")


def is_secret(field: str) -> bool:
    """Whether the conninfo field of this name must not be shown or written anywhere."""
    return "password" in field or "secret" in field or field in ("scram_client_key", "scram_server_key")


def content() -> dict[str, Any]:
    """The file's settings, with names in lower case; empty if there is no file. Raises SettingsError for invalid YAML
    or a secret."""
    if not SETTINGS_FILE.is_file():
        return {}
    try:
        found = _parsed(SETTINGS_FILE.read_text())
    except yaml.YAMLError as error:
        raise SettingsError(_told(error), thing=str(SETTINGS_FILE), do=_FORM) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot be read: {error}", thing=str(SETTINGS_FILE)) from None
    except MALFORMED:
        # For example, a value that looks like a date, but is none. The parser's own message may quote a password.
        raise SettingsError("has a value that is not valid YAML", thing=str(SETTINGS_FILE), do=_FORM) from None
    if found is None:
        raise SettingsError("does not consist of `name: value` lines", thing=str(SETTINGS_FILE), do=_FORM)
    _refuse_secret(found.get("source"))
    return found


def without_secrets(source: str) -> str:
    """The source's conninfo without secrets, so that it may be written to a file."""
    if source == EMBEDDED:
        return source
    given = conninfo_to_dict(source)
    kept = {name: value for name, value in given.items() if not is_secret(name)}
    return source if kept == given else make_conninfo("", **kept)


def save_source(source: str) -> bool:
    """Write the ``source`` line, without secrets. Returns whether the line changed. The rest of the file stays
    unchanged. Raises SettingsError, which quotes the new line, if the line cannot be put into the file."""
    before = content()
    wanted = without_secrets(source)
    if before.get("source") == wanted:
        return False
    line = yaml.safe_dump({"source": wanted}, width=float("inf"), allow_unicode=True).rstrip("\n")
    by_hand = f"write this line into it: {line}"
    try:
        text = SETTINGS_FILE.read_text() if SETTINGS_FILE.is_file() else ""
        written, count = _SOURCE_LINE.subn(lambda _: line, text, count=1)
        if not count:
            written = f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n"
        # If the value extends over several lines, or the file is a map in braces, the edited text means something else.
        if _parsed(written) != {**before, "source": wanted}:
            raise SettingsError("has YAML of a form that pgcdc cannot edit", thing=str(SETTINGS_FILE), do=by_hand)
        write_whole(SETTINGS_FILE, written.encode())
    except yaml.YAMLError:
        raise SettingsError("has YAML of a form that pgcdc cannot edit", thing=str(SETTINGS_FILE), do=by_hand) from None
    except OSError as error:
        raise SettingsError(f"cannot be written: {error.strerror}", thing=str(SETTINGS_FILE), do=by_hand) from None
    return True


class _Loader(yaml.SafeLoader):
    """Refuses a map that has the same name twice. YAML's own loader would silently use the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            # Compared in lower case, because the names of settings do not depend on case.
            if isinstance(key, yaml.ScalarNode) and key.value.lower() in seen:
                where = f"holds `{key.value}` twice, the second time in line {key.start_mark.line + 1}"
                raise SettingsError(where, thing=str(SETTINGS_FILE), do="keep only one of these lines")
            seen.add(str(key.value).lower())
        return super().construct_mapping(node, deep)


def _parsed(text: str) -> dict[str, Any] | None:
    """The names and values in the text; None if the YAML is not a map."""
    found = _Loader(text).get_single_data()
    found = {} if found is None else found
    named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    return {name.lower(): value for name, value in found.items()} if named else None


def _refuse_secret(source: object) -> None:
    if not isinstance(source, str) or source == EMBEDDED:
        return
    try:
        given = conninfo_to_dict(source)
    except (ProgrammingError, UnicodeError):
        raise SettingsError(NO_SOURCE, thing="setting `source`", do=SOURCE_FORM) from None
    if any(is_secret(name) for name in given):
        raise SettingsError(
            f"contains a password, and {SETTINGS_FILE} must not",
            thing="setting `source`",
            do="put it into PGPASSWORD, PGCDC_SOURCE, a service file or a passfile",
        )


def _told(error: yaml.YAMLError) -> str:
    """The line and column where the parser failed. The text there is left out, because it may be a password."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "is not YAML"
    mark = error.problem_mark
    return f"is not YAML at line {mark.line + 1}, column {mark.column + 1}"
