"""Sessions that write concurrently while a block runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.log.conftest import Source


@contextmanager
def writing(source: Source, number: int) -> Iterator[None]:
    """Runs ``number`` sessions, each with small transactions of several statements, one after another."""
    stop = threading.Event()

    def write(writer: int) -> None:
        with source.database.connect() as conn:
            at = writer * 1_000_000
            while not stop.is_set():
                with conn.transaction():
                    conn.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(%s::int, %s::int) g", [at, at + 4])
                    conn.execute("UPDATE a SET v = 'y' WHERE id = %s", [at + 2])
                    conn.execute("INSERT INTO b VALUES (%s, 1.5)", [at])
                at += 5

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
