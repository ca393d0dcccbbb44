"""Places where a run on a cluster could show a secret: web pages, event logs, command lines, files."""

from __future__ import annotations

import html
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tests.cluster.standalone import Cluster

_LINK = re.compile(rb"""(?:href|src)=["']([^"'#]+)""")
_PAGES = ("jobs/", "stages/", "storage/", "environment/", "executors/", "api/v1/applications")
_OF_APPLICATION = ("environment", "allexecutors", "jobs", "stages?details=true&withSummaries=true")
_OF_NO_USE = re.compile(r"\.(js|css|png|svg)$|/kill/|[.]sort=")
_MOST = 150


def pages_of(address: str) -> Iterator[tuple[str, bytes]]:
    """Yields the pages of a web UI, all pages of the same web server to which these pages link, and the answers of the
    server's REST API."""
    todo, seen = [f"{address}/", *(f"{address}/{page}" for page in _PAGES)], set[str]()
    while todo and len(seen) < _MOST:
        url = todo.pop()
        if url in seen or not url.startswith(f"{address}/") or _OF_NO_USE.search(url):
            continue
        seen.add(url)
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=10) as answer:
            content = answer.read()
            yield url, content
            found = [html.unescape(link.decode()).replace(" ", "%20") for link in _LINK.findall(content)]
            todo += [link if "://" in link else f"{address}/{link.lstrip('/')}" for link in found]
            if url.endswith("/applications"):
                for name in re.findall(rb'"id" : "([^"]+)"', content):
                    todo += [f"{url}/{name.decode()}/{more}" for more in _OF_APPLICATION]


def in_files(secret: bytes, *folders: Path) -> list[str]:
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file() and secret in path.read_bytes():
                    found.append(str(path))
    return found


def in_command_lines(secret: str) -> list[str]:
    """The processes of this machine whose command line contains the secret. Every user can read command lines."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if secret in " ".join(process.cmdline()):
                found.append(f"{process.pid} {process.name()}")
    return found


def in_environments(secret: str, cluster: Cluster) -> list[str]:
    """The cluster's processes whose environment contains the secret."""
    found = []
    for top in cluster.processes:
        for process in (top, *top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found += [f"{process.pid}: {name}" for name, value in process.environ().items() if secret in value]
    return found
