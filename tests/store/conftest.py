from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from pgcdc_assets.core.layout import Location
from pgcdc_assets.store import objects
from tests.conftest import SEED
from tests.store.faultproxy import Faults, spoiling


@pytest.fixture
def faults(bucket: Location, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Sends the requests of this process to the object store through the proxy of ``faultproxy``. Returns the object
    that decides which faults the next requests get."""
    port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    faults = Faults(int(SEED))
    monkeypatch.setattr(objects, "_PATIENCE", 30.0)
    with spoiling(port, faults) as before:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{before}")
        objects._bucket.cache_clear()
        yield faults
        faults.share = 0
    objects._bucket.cache_clear()
