"""If a Spark worker has another version of pgcdc, Python or pyarrow than the driver, the worker reports the difference
and starts no work."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import cloudpickle

from pgcdc_assets.errors import MachineError
from pgcdc_assets.spark import tasks
from pgcdc_assets.spark.attempt import Kind, attempted, difference, versions


def marking(path: str) -> str:
    Path(path).touch()
    return "done"


@pytest.mark.parametrize("name", sorted(versions()))
def test_worker_with_another_version_than_the_driver_starts_no_work(name: str, tmp_path: Path) -> None:
    packed = pickle.dumps((marking, str(tmp_path / "mark")))
    kind, answer = attempted(packed, {**versions(), name: "another"})
    assert kind == Kind.OTHER
    assert pickle.loads(answer)[1] == f"has {name} {versions()[name]}, but the driver has another"
    assert not list(tmp_path.iterdir())
    kind, result = attempted(packed, versions())
    assert (kind, pickle.loads(result)) == (Kind.DONE, "done")


def test_package_that_a_worker_does_not_report_counts_as_missing() -> None:
    assert difference({}, {"pyarrow": "26"}) == "has pyarrow none, but the driver has 26"


def test_worker_without_pgcdc_assets_reports_that_the_package_is_missing(tmp_path: Path) -> None:
    """The function that a worker calls is sent by value, so it works even if only Python is installed."""
    (tmp_path / "call").write_bytes(cloudpickle.dumps(tasks._attempt()))
    code = (
        f"import sys; sys.path.append({str(Path(cloudpickle.__file__).parent.parent.parent)!r})\n"
        "from pyspark import cloudpickle; import pickle\n"
        "sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "sys.meta_path = [one for one in sys.meta_path if 'editable' not in str(one)]\n"
        f"kind, answer = cloudpickle.loads(open({str(tmp_path / 'call')!r}, 'rb').read())(b'')\n"
        "print(kind, pickle.loads(answer)[1])"
    )
    done = subprocess.run([sys._base_executable, "-I", "-c", code], capture_output=True, text=True, check=False)  # type: ignore[attr-defined]
    assert done.stdout.strip() == "other has no pgcdc_assets (No module named 'pgcdc_assets')", done.stderr


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ('Lost task 0.3 in stage 0.0 (TID 3) (node7 executor 1): IOException: Cannot run program "env/python"',
         "executor on node7: has no Python at env/python"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11",
         f"executor: has Python 3.12, but the driver has {versions()['Python']}"),
        ("/usr/bin/python3: Error while finding module specification: No module named pyspark",
         "executor: has no pyspark"),
    ],
)  # fmt: skip
def test_worker_that_spark_cannot_start_is_reported_in_one_line(error: str, message: str) -> None:
    unfit = tasks._unfit(error)
    assert isinstance(unfit, MachineError)
    assert str(unfit).startswith(f"{message}; give the executors the driver's environment")
    assert tasks._unfit("java.lang.OutOfMemoryError") is None
