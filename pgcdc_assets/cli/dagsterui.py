"""``python -m pgcdc_assets.cli.dagsterui``: ``dagster dev``, with a webserver that refuses requests of other sites.

``dagster dev`` starts its webserver as a separate process, and has no setting for middleware. So this module replaces
the command of that process by a command of its own, and wraps the application in that process. Both places are private
API of Dagster. If one of them is missing, the start fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from pgcdc_assets.cli.sameorigin import App, SameOrigin

WEBSERVER: Final = "webserver"
"""The first argument of this module in the webserver's process."""
_MODULE: Final = "pgcdc_assets.cli.dagsterui"


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == [WEBSERVER]:
        _webserver(arguments[1:])
    else:
        _dev(arguments)


def _dev(arguments: Sequence[str]) -> None:
    dev: Any = import_module("dagster._cli.dev")
    start = dev.open_ipc_subprocess

    def started(command: Sequence[str], **options: Any) -> Any:
        return start(guarded(command), **options)

    dev.open_ipc_subprocess = started
    sys.argv = ["dagster dev", *arguments]
    dev.dev_command(auto_envvar_prefix="DAGSTER_CLI_DEV")


def guarded(command: Sequence[str]) -> list[str]:
    """The command of a process of ``dagster dev``, with our webserver in place of Dagster's."""
    python, *rest = command
    if rest[:2] == ["-m", "dagster_webserver"]:
        return [python, "-m", _MODULE, WEBSERVER, *rest[2:]]
    return list(command)


def _webserver(arguments: Sequence[str]) -> None:
    cli: Any = import_module("dagster_webserver.cli")
    host = arguments[arguments.index("--host") + 1]
    create = cli.create_app_from_workspace_process_context

    def created(*args: Any, **options: Any) -> App:
        return SameOrigin(create(*args, **options), host)

    cli.create_app_from_workspace_process_context = created
    sys.argv = ["dagster-webserver", *arguments]
    cli.main()


if __name__ == "__main__":
    main(sys.argv[1:])
