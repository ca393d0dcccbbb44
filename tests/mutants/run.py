"""``make mutants``: every rule that is taken out makes its test fail.

In a copy of the checkout, one patch after the other: apply it, run its test, take it back. First all tests
run once without any patch. A mutant is dead only if its test *fails*: an error before the test, a test that
passes or that is not found leaves it alive. Names of patches as arguments choose some.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.patches import Patch, apply, patches, scratch

SECONDS = 600
"""For one test; the slowest starts a JVM."""
FAILED = 1
"""pytest's exit code for failed tests; others are errors of collection or usage."""


@dataclass(frozen=True)
class Outcome:
    """``problem``: why the mutant is alive; None if it is dead. ``told``: what its test said."""

    patch: Patch
    problem: str | None
    seconds: float
    told: str = ""


def main(names: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = scratch(Path(folder).resolve())
        chosen = [patch for patch in patches(copy) if not names or patch.name in names]
        started = time.monotonic()
        sound = _pytest(copy, sorted({patch.test for patch in chosen}))
        if sound.returncode != 0:
            print(sound.stdout, sound.stderr, sep="\n")
            print("The tests fail without any patch.")
            return 1
        print(f"Without a patch all pass: {time.monotonic() - started:.0f} s", flush=True)
        outcomes = [_shown(_tried(patch, copy)) for patch in chosen]
    alive = [outcome for outcome in outcomes if outcome.problem is not None]
    print(f"\n{len(outcomes) - len(alive)} of {len(outcomes)} mutants are dead, "
          f"after {sum(outcome.seconds for outcome in outcomes):.0f} s")  # fmt: skip
    return 1 if alive else 0


def _tried(patch: Patch, copy: Path) -> Outcome:
    started = time.monotonic()
    refused = apply(patch, copy)
    if refused is not None:
        return Outcome(patch, f"the patch does not apply: {refused}", 0.0)
    try:
        done = _pytest(copy, [patch.test])
    finally:
        apply(patch, copy, "--reverse")
    told = re.search(r"^FAILED \S+ - (.*)", done.stdout, re.MULTILINE)
    return Outcome(patch, _problem(done), time.monotonic() - started, told[1] if told else "")


def _problem(done: subprocess.CompletedProcess[str]) -> str | None:
    """Why the mutant is alive; None if its test failed."""
    if done.returncode == 0:
        return "its test passes"
    failed = re.search(r"^FAILED (.*)", done.stdout, re.MULTILINE)
    if done.returncode != FAILED or failed is None:
        last = [*done.stdout.split("\n")[-5:], *done.stderr.split("\n")[-5:]]
        return f"its test does not run (exit code {done.returncode}): {' | '.join(line for line in last if line)}"
    broken = re.search(r"(ImportError|ModuleNotFoundError|NameError|SyntaxError|IndentationError)\b", failed[1])
    return f"its test fails for another reason: {failed[1]}" if broken else None


def _pytest(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--no-header", "--tb=short", "-p", "no:cacheprovider",
               "--durations=0", "--durations-min=999", *tests]  # fmt: skip
    # The copy comes before the installed checkout, also for the processes that a test starts.
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=copy, env=env, capture_output=True, text=True, timeout=SECONDS * len(tests), check=False
    )


def _shown(outcome: Outcome) -> Outcome:
    patch = outcome.patch
    state = "dead " if outcome.problem is None else "ALIVE"
    print(f"{state} {outcome.seconds:5.1f} s  {patch.name}: {patch.rule}\n               {patch.test}", flush=True)
    print(f"               {outcome.problem or outcome.told}", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
