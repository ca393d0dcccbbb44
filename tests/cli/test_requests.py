"""The commands that direct a sync (``until``, ``pause``, ``resume``, ``positions``), in a project where no sync is
running."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from pgcdc_assets.checks import positions
from tests.cli.conftest import Shell


def test_requests_can_be_made_shown_and_withdrawn(shell: Shell) -> None:
    shell.pgcdc("setup")
    before = json.loads(shell.pgcdc("positions", "--json"))
    assert before["apply"] == "running"
    assert before["endpos"] is None
    assert before["at_work"] is None
    assert shell.pgcdc("until", "7/AB") == "syncs end at 7/AB\n"
    assert shell.pgcdc("pause", "apply") == "apply is paused: changes only go into the log\n"
    assert "already" in shell.pgcdc("pause", "apply")
    found = json.loads(shell.pgcdc("positions", "--json"))
    assert (found["endpos"], found["apply"]) == ("7/AB", "paused")
    assert "endpos         7/AB" in shell.pgcdc("positions")
    assert shell.pgcdc("resume", "apply") == "changes are applied\n"
    assert shell.pgcdc("until", "--current").startswith("syncs end at ")
    assert shell.pgcdc("until", "--clear") == "syncs no longer end at an LSN\n"
    after = json.loads(shell.pgcdc("positions", "--json"))
    assert (after["endpos"], after["apply"]) == (None, "running")


def test_positions_are_read_from_the_lowest_to_the_highest(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions may rise between two reads. If the higher position were read first, the lower position could appear to
    be above it."""
    asked: list[str] = []

    def noted(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def ask(*given: object) -> object:
            asked.append(name)
            return original(*given)

        return ask

    shell.pgcdc("setup")
    for name in ("flush_lsn", "lowest_replayed"):
        monkeypatch.setattr(positions, name, noted(name, getattr(positions, name)))
    shell.pgcdc("positions")
    assert asked == ["lowest_replayed", "flush_lsn"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["until"], "Give an LSN, --current or --clear."),
        (["until", "1/0", "--clear"], "Give an LSN, --current or --clear."),
        (["until", "nowhere"], "nowhere"),
        (["pause"], "Missing argument"),
        (["pause", "copies"], "'copies' is not 'apply'"),
    ],
)
def test_a_wrong_argument_is_explained(shell: Shell, arguments: list[str], told: str) -> None:
    shell.pgcdc("setup")
    assert told in shell.pgcdc(*arguments, expect=2)


def test_without_a_project_the_commands_advise_setup(shell: Shell) -> None:
    for arguments in (["until", "1/0"], ["pause", "apply"], ["positions"]):
        assert "run `pgcdc setup`" in shell.pgcdc(*arguments, expect=1)
    assert not any(name.startswith("lake") for name in shell.files())
