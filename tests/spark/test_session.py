"""The Spark session and its tasks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.settings import Settings
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.spark.tasks import TaskSum, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def doubled(number: int) -> tuple[int, int]:
    return number * 2, os.getpid()


def first(result: tuple[int, int]) -> int:
    return result[0]


def refusing(number: int) -> int:
    if number == 2:
        raise ProtocolError("is not so", thing="message I", lsn="0/5", do="look")
    return number


def broken(number: int) -> int:
    raise ZeroDivisionError


def marking(folder: str) -> None:
    (Path(folder) / f"{os.getpid()}-{os.urandom(8).hex()}").touch()


def test_spark_session_keeps_the_signal_handlers_of_the_process(spark: SparkSession) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "as tests/conftest.py set it"


def test_results_of_tasks_are_in_the_order_of_their_inputs(spark: SparkSession) -> None:
    results = run_tasks(spark, doubled, [5, 3, 9, 1, 7])
    assert [number for number, _ in results] == [10, 6, 18, 2, 14]
    assert os.getpid() not in {pid for _, pid in results}


def test_task_sum_adds_up_the_results_of_several_spark_jobs(spark: SparkSession) -> None:
    total = TaskSum(spark, first)
    for job in ([5, 3, 9], [1]):
        run_tasks(spark, doubled, job, [total])
    assert total.value == 36


def test_each_task_runs_once(spark: SparkSession, tmp_path: Path) -> None:
    run_tasks(spark, marking, [str(tmp_path)] * 5)
    assert len(list(tmp_path.iterdir())) == 5


def test_error_of_pgcdc_in_a_task_keeps_its_class_and_message(spark: SparkSession) -> None:
    with pytest.raises(ProtocolError) as caught:
        run_tasks(spark, refusing, [1, 2, 3])
    assert str(caught.value) == "message I: is not so, at LSN 0/5; look"


def test_unexpected_error_in_a_task_fails_the_spark_job(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="ZeroDivisionError"):
        run_tasks(spark, broken, [1])


def test_a_process_has_only_one_spark_session(spark: SparkSession, tmp_path: Path) -> None:
    again = spark_session(Settings(lake=tmp_path))
    assert again.sparkContext is spark.sparkContext
