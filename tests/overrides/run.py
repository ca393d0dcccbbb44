"""``make overrides`` checks that each override makes its test fail.

First, all tests run once without any override. Then each test runs with its override. An override counts as dead if its
test fails, because the broken promise was then noticed. It counts as alive if the test passes, does not run, or fails
because the override itself has an error. Arguments are the names of the overrides to run (default: all).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.overrides.applied import VARIABLE
from tests.overrides.override import Override, overrides

ROOT: Final = Path(__file__).resolve().parents[2]
SITE: Final = ROOT / "tests" / "overrides" / "site"
SECONDS: Final = 600
"""The time limit of one test. The slowest test starts a JVM."""
FAILED: Final = 1
"""pytest's exit code for failed tests. Higher exit codes mean errors of collection or usage."""


@dataclass(frozen=True)
class Outcome:
    """``problem``: why the override counts as alive, or None if its test failed and the override is therefore dead.
    ``error``: the error with which the test failed."""

    problem: str | None
    seconds: float
    error: str = ""


def main(names: Sequence[str]) -> int:
    found = overrides()
    if unknown := [name for name in names if name not in found]:
        print(f"There is no override {', '.join(unknown)}.", file=sys.stderr)
        return 2
    chosen = [each for each in found.values() if not names or each.name in names]
    started = time.monotonic()
    sound = _pytest(sorted({each.test for each in chosen}))
    if sound.returncode != 0:
        print(sound.stdout, sound.stderr, sep="\n")
        print("The tests fail without any override.")
        return 1
    print(f"Without an override all pass: {time.monotonic() - started:.0f} s", flush=True)
    alive = 0
    for each in chosen:
        outcome = _tried(each)
        alive += outcome.problem is not None
        _show(each, outcome)
    print(f"\n{len(chosen) - alive} of {len(chosen)} overrides are dead, after {time.monotonic() - started:.0f} s")
    return 1 if alive else 0


def _tried(override: Override) -> Outcome:
    started = time.monotonic()
    done = _pytest([override.test], override.name)
    error = re.search(r"^FAILED \S+.*? - (.*)", done.stdout, re.MULTILINE)
    return Outcome(_problem(override, done), time.monotonic() - started, error[1] if error else "")


def _problem(override: Override, done: subprocess.CompletedProcess[str]) -> str | None:
    """Why the override counts as alive. None if its test failed, so that the override is dead."""
    if done.returncode == 0:
        return "its test passes"
    failed = re.search(r"^FAILED (.*)", done.stdout, re.MULTILINE)
    if done.returncode != FAILED or failed is None:
        last = [*done.stdout.split("\n")[-5:], *done.stderr.split("\n")[-5:]]
        return f"its test does not run (exit code {done.returncode}): {' | '.join(line for line in last if line)}"
    broken = re.search(
        r"^.*(\b(ImportError|ModuleNotFoundError|NameError|SyntaxError|LookupError|AttributeError)\b"
        r"|TypeError: (?:<lambda>|_\w+)\.<locals>).*$",
        failed[1],
    )
    inside = re.search(r"^tests/overrides/\w+\.py:\d+: in .*\nE  ", done.stdout, re.MULTILINE)
    if broken is not None or inside is not None:
        return f"the override itself fails: {failed[1]}"
    return None


def _pytest(tests: Sequence[str], override: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--run-long", "--no-header", "--tb=short"]
    command += ["-p", "no:cacheprovider", "--hypothesis-profile=unshrunk", "--durations=0", "--durations-min=999"]
    # Tests, and the processes that they start, import the package from this checkout instead of an installed package.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]), "COLUMNS": "200"}
    env |= {} if override is None else {VARIABLE: override}
    return subprocess.run(
        [*command, *tests], cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS * len(tests), check=False
    )


def _show(override: Override, outcome: Outcome) -> None:
    state = "dead " if outcome.problem is None else "ALIVE"
    print(f"{state} {outcome.seconds:5.1f} s  {override.name}: {override.rule}\n               {override.test}")
    print(f"               {outcome.problem or outcome.error}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
