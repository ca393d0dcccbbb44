"""Partitioned tables without a key that have REPLICA IDENTITY FULL only at the root. The stream sends the old rows of a
partition with the partition's own replica identity."""

from __future__ import annotations

import pytest

from pgcdc_assets.core.names import TableName
from tests.flow.rig import Rig

pytestmark = [pytest.mark.spark, pytest.mark.long]

P = TableName("public", "p")


def _copies(rig: Rig) -> int:
    return [copy.table for copy in rig.observer.copies].count(P)


def test_inserts_are_followed_without_a_new_copy(rig: Rig) -> None:
    """Setup publishes only inserts of the partition, because it has no replica identity."""
    rig.commit(
        "CREATE TABLE p (id int, part int) PARTITION BY LIST (part)", "ALTER TABLE p REPLICA IDENTITY FULL",
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES IN (1)", "INSERT INTO p VALUES (1, 1)",
    )  # fmt: skip
    rig.started()
    for number in (1, 2):
        rig.commit(f"INSERT INTO p VALUES ({number}, 1)")
        assert rig.sync().set_aside == []
        rig.assert_equal("public.p")
    assert _copies(rig) == 1


def test_delete_sets_a_table_aside_if_the_stream_sends_only_the_key_of_the_partition(rig: Rig) -> None:
    """The publication sends the rows under the root's name, so the old row of the DELETE has the letter of FULL. It is
    (5, NULL, NULL), which equals a row of the other partition."""
    rig.commit(
        "CREATE TABLE p (id int, part int, v text) PARTITION BY LIST (part)", "ALTER TABLE p REPLICA IDENTITY FULL",
        "CREATE TABLE p_1 PARTITION OF p (PRIMARY KEY (id)) FOR VALUES IN (1)",
        "CREATE TABLE p_other PARTITION OF p (PRIMARY KEY (id)) DEFAULT",
        "INSERT INTO p VALUES (5, 1, 'five'), (5, NULL, NULL)",
        f"CREATE PUBLICATION {rig.settings.publication} FOR TABLE p, t WITH (publish_via_partition_root)",
    )  # fmt: skip
    rig.started()
    rig.commit("INSERT INTO p VALUES (6, 1, 'six')")
    assert rig.sync().set_aside == []
    rig.assert_equal("public.p")
    rig.commit("DELETE FROM p WHERE part = 1 AND id = 5")
    ((name, reason),) = rig.sync().set_aside
    assert (name, reason) == (P, "updates or deletes arrived, although the mirror has no key and follows inserts only")
    assert _copies(rig) == 1
