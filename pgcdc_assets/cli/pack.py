"""``pgcdc pack``: packs this environment as an archive for the executors of a Spark cluster."""

from __future__ import annotations

from pathlib import Path

import click

from pgcdc_assets.cli.lines import say


@click.command()
@click.option("-o", "output", type=click.Path(dir_okay=False, path_type=Path), default=Path("pgcdc_env.tar.gz"),
              show_default=True, help="The archive.")  # fmt: skip
def pack(output: Path) -> int:
    """Pack this environment for the executors of a Spark cluster. Name the archive in `spark: {archive: ...}`."""
    from pgcdc_assets.spark import archive
    from pgcdc_assets.spark.attempt import versions

    if not output.name.endswith((".tar.gz", ".tgz")):
        raise click.BadParameter("Spark unpacks .tar.gz and .tgz", param_hint="-o")
    packed = archive.pack(output.absolute())
    ours = versions()
    say(f"wrote {output}: {packed.bytes / 1e6:.0f} MB, pgcdc_assets {ours['pgcdc_assets']} and "
        f"{len(packed.packages) - 1} packages, for nodes with Python {ours['Python']}")  # fmt: skip
    return 0
