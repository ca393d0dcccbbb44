"""The mutants: patches that each take one rule out of the package, and the test that notices.

A patch file begins with two lines, ``# rule: ...`` and ``# test: ...`` (a pytest node id), and goes on as a
unified diff against the checkout.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Patch:
    path: Path
    rule: str
    test: str

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def files(self) -> list[str]:
        """What it changes, relative to the checkout."""
        lines = self.path.read_text().splitlines()
        return [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]


def patches(root: Path = ROOT) -> list[Patch]:
    """All of a checkout, by name. ValueError for one without its two lines."""
    return [_read(path) for path in sorted((root / "tests" / "mutants").glob("*.patch"))]


def _read(path: Path) -> Patch:
    rule, test, *_ = path.read_text().splitlines()
    if not (rule.startswith("# rule: ") and test.startswith("# test: ")):
        raise ValueError(f"{path.name} does not begin with its rule and its test")
    return Patch(path, rule.removeprefix("# rule: "), test.removeprefix("# test: "))


def scratch(folder: Path) -> Path:
    """A copy of the package and its tests in ``folder``; the checkout itself is never patched."""
    for name in ("pgcdc_assets", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    for name in ("pyproject.toml", "dagster.yaml", "workspace.yaml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def apply(patch: Patch, folder: Path, *options: str) -> str | None:
    """``git apply`` in ``folder``; what git said where it does not apply."""
    command = ["git", "apply", "--whitespace=nowarn", *options, str(patch.path)]
    # Outside of any repository: a file that a repository ignores would be passed over in silence.
    env = {"GIT_CEILING_DIRECTORIES": str(folder.parent), "PATH": _path()}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()


def _path() -> str:
    git = shutil.which("git")
    if git is None:
        raise FileNotFoundError("git is not installed")
    return str(Path(git).parent)
