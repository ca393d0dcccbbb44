"""An S3 server for tests: S3Proxy, a JVM process that stores objects in a local folder. S3Proxy supports conditional
PUTs, as S3 does. It is downloaded once, like Delta's jars and into the same cache."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from pgcdc_assets.core.layout import Location
from pgcdc_assets.spark.jars import Artifact, cached, java_command, retrieve
from tests.servers import held_port
from tests.waiting import wait_for

S3PROXY: Final = "4.1.0"
BUCKET: Final = "lakes"
IDENTITY, SECRET = "test-identity", "test-secret"
_LOGGING = """<configuration><appender name="out" class="ch.qos.logback.core.ConsoleAppender"><encoder>
<pattern>%-5level %logger{0} %msg%n</pattern></encoder></appender><root level="WARN"><appender-ref ref="out"/></root>
</configuration>"""


def environment(port: int) -> dict[str, str]:
    """Environment variables for a process that uses the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": IDENTITY, "AWS_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip


@contextmanager
def s3_server(folder: Path, port: int) -> Iterator[None]:
    """Runs the server on a port of this machine. The folder gets the server's log, and a folder for each bucket."""
    jars = cached(f"jars/s3proxy-{S3PROXY}", _fetch)
    (folder / "logback.xml").write_text(_LOGGING)
    (folder / "data" / BUCKET).mkdir(parents=True)
    settings = {
        "s3proxy.endpoint": f"http://127.0.0.1:{port}", "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": IDENTITY, "s3proxy.credential": SECRET,
        "jclouds.provider": "filesystem-nio2", "jclouds.filesystem.basedir": str(folder / "data"),
    }  # fmt: skip
    (folder / "s3proxy.conf").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    command = [
        java_command(), "-Xmx256m", f"-Dlogback.configurationFile={folder / 'logback.xml'}", "-cp", f"{jars}/*",
        "org.gaul.s3proxy.Main", "--properties", str(folder / "s3proxy.conf"),
    ]  # fmt: skip
    with (folder / "s3proxy.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: _answers(process, port, folder / "s3proxy.log"), what="S3Proxy")
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


_PORT: Final = held_port()
# The variables are set at import, because Spark's workers get the environment that the JVM was started with. The JVM
# may start before a test requests the S3 server.
os.environ.update(environment(_PORT))


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a bucket, for this process and the processes that it starts."""
    with s3_server(tmp_path_factory.mktemp("s3"), _PORT):
        yield f"s3://{BUCKET}"


@pytest.fixture
def bucket(s3: str) -> Location:
    """An empty folder in the bucket, for one test."""
    return Location.of(f"{s3}/{uuid.uuid4().hex}")


def _fetch(folder: Path) -> None:
    retrieve(Artifact("org.gaul", "s3proxy", S3PROXY, title=f"S3Proxy {S3PROXY} for tests", size="57 MB"), folder)


def _answers(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
    except urllib.error.HTTPError:
        # The server is up. It refuses this request only because the request has no credentials.
        return True
    except OSError:
        return False
    return True
