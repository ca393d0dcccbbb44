"""The syntax of three settings: ``messages`` (patterns for prefixes), ``spark`` (a master URL), and ``registry`` (the
catalog in which mirrors are registered)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

_VERBATIM = re.compile(r'"((?:[^"]|"")+)"')

_ONE_UP: Final = r"0*[1-9]\d*"
_LOCAL: Final = re.compile(rf"local(\[(\*|{_ONE_UP})(\s*,\s*{_ONE_UP})?\])?")
"""Matches ``local``, with the number of threads and the number of failures allowed for a task. Spark refuses zero for
either number."""
_KNOWN: Final = re.compile(rf"{_LOCAL.pattern}|local-cluster\[.*\]|spark://.+|yarn|k8s://.+")
_OF_THIS_HOST: Final = re.compile(r"local-cluster\[.*\]|spark://(127(\.\d+){3}|localhost|\[::1\])(:\d+)?")


@dataclass(frozen=True)
class PrefixPatterns:
    """Patterns that must match a whole prefix, with ``*`` and ``?``, like the patterns for tables. A pattern with a
    leading ``-`` excludes the prefixes that it matches. A pattern in double quotes is compared verbatim. A prefix is
    chosen if an including pattern matches it, and no excluding pattern does."""

    included: tuple[re.Pattern[str], ...] = ()
    excluded: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def parse(cls, patterns: Sequence[str]) -> Self:
        """Raises ValueError, with a message for the user, for an invalid pattern, or if there are only exclusions."""
        wanted = tuple(_compiled(text, text) for text in patterns if not text.startswith("-"))
        unwanted = tuple(_compiled(text[1:], text) for text in patterns if text.startswith("-"))
        if unwanted and not wanted:
            raise ValueError('excludes prefixes and includes none; write it like ["*", "-debug.*"]')
        return cls(wanted, unwanted)

    def match(self, prefix: str) -> bool:
        if any(pattern.fullmatch(prefix) for pattern in self.excluded):
            return False
        return any(pattern.fullmatch(prefix) for pattern in self.included)


def _compiled(text: str, given: str) -> re.Pattern[str]:
    if verbatim := _VERBATIM.fullmatch(text):
        return re.compile(re.escape(verbatim[1].replace('""', '"')))
    if not text or text != text.strip() or '"' in text or "\0" in text:
        raise ValueError(
            f'{given!r} is not a pattern for prefixes; write it like outbox.*, app, -outbox.debug, or "verbatim"'
        )
    body = "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in text)
    return re.compile(body, re.DOTALL)


def is_known(master: str) -> bool:
    """Whether the driver can run on this master: local, standalone, YARN or Kubernetes."""
    return _KNOWN.fullmatch(master) is not None


def is_local(master: str) -> bool:
    """Whether the tasks run in the driver's JVM, with the driver's file system, environment and Python. False for
    ``local-cluster[...]``: its executors are separate processes, as on other machines."""
    return _LOCAL.fullmatch(master) is not None


def on_this_host(master: str) -> bool:
    """Whether this master runs all executors on the driver's machine."""
    return is_local(master) or _OF_THIS_HOST.fullmatch(master) is not None


REGISTRIES: Final = {
    "unity": (re.compile(r"https?://[^/@?#\s]+(/[^@?#\s]*)?"), "the URL of its server, like https://unity.example.org"),
    "glue": (re.compile(r"[a-z0-9-]+"), "a region of AWS, like eu-central-1"),
    "hive": (re.compile(r"thrift://[^/@?#\s]+:\d+"), "the metastore's address, like thrift://hive.example.org:9083"),
}  # fmt: skip
"""The kinds of catalogs in which mirrors can be registered, each with the form of its address."""
_BESIDE: Final = {
    "catalog": (re.compile(r"[^.\s/]+"), "a name without dot, space or slash"),
    "prefix": (re.compile(r"[a-z0-9_]*"), "characters from a-z, 0-9 and _"),
}  # fmt: skip


def checked_registry(given: Mapping[str, str]) -> dict[str, str]:
    """Checks the setting ``registry``. It has one key of REGISTRIES, and ``catalog`` for Unity Catalog or ``prefix``
    for the others. Raises ValueError, whose message quotes no value, because an address may contain a secret."""
    kinds = [key for key in given if key in REGISTRIES]
    if len(kinds) != 1:
        raise ValueError("needs exactly one of `unity`, `glue` and `hive`")
    beside = "catalog" if kinds == ["unity"] else "prefix"
    if odd := [key for key in given if key not in (*kinds, beside)]:
        raise ValueError(f"has the key {odd[0]!r}, but the only keys are `{kinds[0]}` and `{beside}`")
    if beside == "catalog" and beside not in given:
        raise ValueError("needs `catalog`, the name of an existing catalog on the server")
    for key, value in given.items():
        form, words = (REGISTRIES | _BESIDE)[key]
        if not form.fullmatch(value):
            raise ValueError(f"`{key}` must be {words}; credentials come from the environment")
    return dict(given)
