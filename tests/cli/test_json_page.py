"""The program in ``docs/reference/json.md``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.cli.conftest import Shell


def test_the_program_in_the_docs_prints_problems_and_lags(shell: Shell) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    shell.pgcdc("setup")
    with shell.database.connect() as conn:
        conn.execute("DROP TABLE b")
    shell.patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    exec(program, {})
    printed = shell.streams.readouterr().out.splitlines()
    assert printed[0].startswith("error table_unpublished table public.b is no longer published")
    assert printed[-2:] == ["public.a waiting None", "public.b waiting None"]
