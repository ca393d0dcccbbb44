"""A change log that a test writes itself, batch by batch."""

from __future__ import annotations

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.batch import BatchWriter, PendingFrames
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.relations import Relations
from tests.log.streams import begin, commit, describe, frame, insert, relation, run_of

WHO = Identity("7", "db", "slot")
START = Lsn(100)


def writer_of(log: ChangeLog) -> tuple[BatchWriter, Relations]:
    relations = Relations()
    for relation_id in (1, 2):
        describe(relations, relation(relation_id, f"t{relation_id}"), 0)
    return BatchWriter(log.path, WHO, 3, relations), relations


def frames_of(at: int, relation_id: int = 1, number: int = 2) -> PendingFrames:
    payloads = [begin(at, 5), *[insert(relation_id, b"x")] * number, commit(at, at + 50)]
    frames = PendingFrames()
    frames.append(run_of([frame(payload, at) for payload in payloads], 0))
    return frames
