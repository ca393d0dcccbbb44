"""The generated parts of the reference, in Markdown. A page has a part where it says ``<!-- generated: NAME -->``."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from pgcdc_assets import errors, settings
from pgcdc_assets.checks import problemcodes
from pgcdc_assets.checks.problemcodes import ProblemCode
from pgcdc_assets.cli.main import TOPICS, pgcdc
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.metrics.families import FAMILIES
from pgcdc_assets.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "json"

EXAMPLES: Final = {
    "name": "shop",
    "source": "host=db.example.org dbname=shop user=replicator sslmode=verify-full",
    "lake": "s3://bucket/shop",
    "lake_shared": "true",
    "slot": "pgcdc_shop",
    "publication": "pgcdc_shop",
    "tables": '["public.*", "-public.audit_*"]',
    "messages": '["outbox.*"]',
    "origin": "none",
    "streaming": "off",
    "two_phase": "true",
    "schema_changes": "set_aside",
    "recopy_bytes": "100GiB",
    "spark": '{master: "local[4]", spark.driver.memory: 4g}',
    "registry": "{unity: https://unity.example.org, catalog: shop}",
    "range_bytes": "1GiB",
    "range_seconds": "300",
    "batch_bytes": "64MiB",
    "batch_seconds": "5",
    "drain_bytes": "64MiB",
    "idle_seconds": "60",
    "run_seconds": "3600",
    "sensor_seconds": "30",
    "retention": "14 days",
    "log_format": "json",
    "state": "/var/lib/pgcdc",
}
"""One line of ``pgcdc.yaml`` for each setting."""
GUIDES: Final = {
    "source": ("Prepare PostgreSQL", "../guides/prepare_postgresql.md"),
    "name": ("In your own Dagster project", "../guides/own_dagster.md"),
    "lake": ("A lake in an object store", "../guides/object_stores.md"),
    "lake_shared": ("A Spark cluster", "../guides/spark_cluster.md"),
    "tables": ("Choose tables", "../guides/choose_tables.md"),
    "publication": ("Choose tables", "../guides/choose_tables.md"),
    "messages": ("Outbox messages", "../guides/outbox.md"),
    "origin": ("Origins", "#origins"),
    "streaming": ("Transactions in progress", "../explanation/in_progress.md"),
    "two_phase": ("Transactions in progress", "../explanation/in_progress.md"),
    "schema_changes": ("Schema changes", "../guides/schema_changes.md"),
    "recopy_bytes": ("Large and partitioned tables", "../guides/large_tables.md"),
    "spark": ("A Spark cluster", "../guides/spark_cluster.md"),
    "registry": ("Find mirrors by name", "../guides/catalogs.md"),
    "retention": ("Maintenance", "../guides/maintenance.md"),
    "log_format": ("Monitoring", "../guides/monitoring.md"),
}
"""The page that says more about a setting."""


def settings_part() -> str:
    """A table of all settings, and a section for each setting."""
    docs = field_docs(settings, "Settings")
    rows, sections = [], []
    for name, field in Settings.model_fields.items():
        text = docs[name]
        rows.append(f"| [`{name}`](#{name}) | {_default(name, field)} | {_first_sentence(text)} |")
        sections.append(_setting(name, field, text))
    return "\n".join(["| setting | default | what it is |", "|---|---|---|", *rows, "", *sections])


def _setting(name: str, field: FieldInfo, text: str) -> str:
    facts = [f"- Default: {_default(name, field)}", f"- Form: {_form(field)}"]
    facts.append(f"- Environment: `{PREFIX}{name.upper()}`{_as_json(field)}")
    if name in GUIDES:
        title, link = GUIDES[name]
        facts.append(f"- More: [{title}]({link})")
    example = f"```yaml\n{name}: {EXAMPLES[name]}\n```"
    return "\n".join([f"### `{name}` {{#{name}}}", "", text, "", *facts, "", example, ""])


def _default(name: str, field: FieldInfo) -> str:
    if name in ("slot", "publication"):
        return "`pgcdc`; `pgcdc_<name>` if `name` is set"
    value = field.get_default(call_default_factory=True)
    if name == "tables":
        return "all permanent tables"
    if value is None or value == ():
        return "none"
    if isinstance(value, timedelta):
        return f"`{value.days} days`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 20:
        return f"`{value >> 30}GiB`" if value % (1 << 30) == 0 else f"`{value >> 20}MiB`"
    if isinstance(value, Mapping):
        items = ", ".join(f'{key}: "{item}"' for key, item in value.items())
        return f"`{{{items}}}`"
    return f"`{value}`"


def _form(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(field.annotation))
    if field.annotation is int:
        return "whole seconds" if field.default and field.default < 1 << 20 else "a size such as `256MiB`"
    named: dict[object, str] = {
        bool: "`true` or `false`",
        float: "seconds",
        tuple[str, ...]: "a list of texts",
        Path: "a folder",
        timedelta: "a time such as `7 days`, `12 hours` or `30 minutes`",
    }
    return named.get(field.annotation) or ("a map of texts" if "dict" in str(field.annotation) else "a text")


def _as_json(field: FieldInfo) -> str:
    return ", as JSON" if _form(field) in ("a list of texts", "a map of texts") else ""


def commands_part() -> str:
    """A section for each command, under its topic, from the parser."""
    parts = []
    for topic, commands in TOPICS.items():
        parts += [f"## {topic}", ""]
        for command in commands:
            parts += [*_command(command), ""]
    return "\n".join(parts)


def _command(command: click.Command) -> Iterator[str]:
    name = str(command.name)
    # Click keeps the help options of the first context in the command.
    context = click.Context(command, info_name=f"pgcdc {name}", **pgcdc.context_settings)
    yield from (f"### `pgcdc {name}` {{#{name}}}", "", _plain(inspect.cleandoc(command.help or "")), "")
    yield from ("```text", f"pgcdc {name} {' '.join(command.collect_usage_pieces(context))}", "```", "")
    records = (item.get_help_record(context) for item in command.params if item.name != "log_format")
    options = [(option, text) for option, text in filter(None, records) if text]
    if options:
        yield from ("| option | what it does |", "|---|---|")
        yield from (f"| `{_cell(option)}` | {_cell(text)} |" for option, text in options)
        yield ""
    lines = (command.epilog or "").splitlines()[2:]
    yield from ("```sh", *(line.strip() for line in lines), "```")


def errors_part() -> str:
    """A section for each error, under the headings of the module."""
    source = inspect.getsource(errors)
    parts = []
    for title, body in re.findall(
        r"^# (\w[^\n]*?) -+\n(.*?)(?=^# \w[^\n]*? -+\n|\Z)", source, re.DOTALL | re.MULTILINE
    ):
        parts += [f"## {title}", ""]
        for name in re.findall(r"^class (\w+)\(", body, re.MULTILINE):
            parts += [*_error(getattr(errors, name)), ""]
    return "\n".join(parts)


def _error(kind: type[PgcdcError]) -> Iterator[str]:
    yield from (
        f"### {kind.__name__} {{#{kebab(kind.__name__)}}}",
        "",
        _plain(inspect.cleandoc(kind.__doc__ or "")),
        "",
    )
    yield f"Exit code {kind.exit_code}.{' Retryable.' if kind.retryable else ''}"


def codes_part() -> str:
    """A table of the codes of problems, with their docstrings."""
    docs = field_docs(problemcodes, "ProblemCode")
    rows = [f"| `{code}`{{#{code}}} | {_cell(docs[code.name])} |" for code in ProblemCode]
    return "\n".join(["| code | the problem |", "|---|---|", *rows])


def metrics_part() -> str:
    """A table of the metrics."""
    rows = [
        f"| `{name}`{{#{name}}} | {kind} | {', '.join(f'`{label}`' for label in labels)} | {_cell(text)} |"
        for name, (kind, text, labels) in FAMILIES.items()
    ]
    return "\n".join(["| metric | type | labels | what it is |", "|---|---|---|---|", *rows])


def kebab(name: str) -> str:
    """``SlotMissing`` becomes ``slot-missing``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def json_part() -> str:
    """A table of the fields of each JSON document."""
    parts = []
    for file in sorted(SCHEMAS.glob("*.schema.json")):
        name = file.name.removesuffix(".schema.json")
        schema = json.loads(file.read_text())
        parts += [f"### {name} {{#{name}}}", "", "| field | type | what it is |", "|---|---|---|"]
        fields = _fields(_resolved(schema, schema), schema, "")
        parts += [f"| `{path}` | {form} | {_cell(_plain(text))} |" for path, form, text in fields]
        parts.append("")
    return "\n".join(parts)


def _fields(node: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
    for name, given in node.get("properties", {}).items():
        field, inner = f"{path}{name}", _resolved(given, schema)
        choices = [_resolved(choice, schema) for choice in inner.get("anyOf", [inner])]
        told = [one.get("description") for one in (given, inner, *choices, _resolved(inner.get("items", {}), schema))]
        yield field, _json_type(given, schema), next(filter(None, told), "")
        for choice in choices:
            more = f"{field}[]." if choice.get("type") == "array" else f"{field}."
            yield from _fields(_resolved(choice.get("items", choice), schema), schema, more)
            if isinstance(values := choice.get("additionalProperties"), dict):
                yield from _fields(_resolved(values, schema), schema, f"{field}.*.")


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _json_type(node: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    node = _resolved(node, schema)
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_json_type(choice, schema) for choice in node["anyOf"]))
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    if node.get("type") == "array":
        return f"array of {_json_type(node.get('items', {}), schema)}"
    return str(node.get("type", "any"))


def field_docs(module: ModuleType, name: str) -> dict[str, str]:
    """The docstrings of a class's fields."""
    (found,) = (node for node in ast.parse(inspect.getsource(module)).body
                if isinstance(node, ast.ClassDef) and node.name == name)  # fmt: skip
    docs: dict[str, str] = {}
    for field, text in pairwise(found.body):
        target = field.targets[0] if isinstance(field, ast.Assign) else getattr(field, "target", None)
        if isinstance(target, ast.Name) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[target.id] = _plain(inspect.cleandoc(str(text.value.value)))
    return docs


def _plain(text: str) -> str:
    """Markdown for the text of a docstring."""
    text = re.sub(r":\w+:`~?\.?([^`]*)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _first_sentence(text: str) -> str:
    return _cell(re.split(r"(?<=\.) ", " ".join(text.split()), maxsplit=1)[0])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "settings": settings_part,
    "commands": commands_part,
    "errors": errors_part,
    "codes": codes_part,
    "metrics": metrics_part,
    "json": json_part,
}
MARKED: Final = re.compile(r"(<!-- generated: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
"""A part in a page, between its marks."""


def with_parts(text: str) -> str:
    """The page with its present parts, for readers of the repository. Their anchors are HTML, which GitHub needs."""

    def part(found: re.Match[str]) -> str:
        body = re.sub(r" ?\{#([\w-]+)\}", r' <a id="\1"></a>', PARTS[found[2]]()).strip()
        return f"{found[1]}{body}{found[3]}"

    return MARKED.sub(part, text)


def main() -> None:
    """Write the generated parts into the pages."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if (text := with_parts(before := page.read_text())) != before:
            page.write_text(text)


if __name__ == "__main__":
    main()
