"""Tables, columns, keys, partitions and types as the catalog reader returns them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, SettingsError
from pgcdc_assets.mirror.delta.mirrorschema import refusal
from pgcdc_assets.source.catalog.pgclass import Index, RowIdentity, mirror_key
from pgcdc_assets.source.catalog.tables import TablePatterns, read_tables, relation_facts
from pgcdc_assets.source.connect.connection import connect
from tests.fix_postgres import Database


def tables_of(database: Database, ddl: str, publications: str = "p") -> dict[str, Table]:
    with connect(database.conninfo) as conn:
        conn.execute(f"SET search_path = public; {ddl}".encode())
        found = read_tables(conn, publications.split(","))
    assert [Table.from_json(json.loads(json.dumps(table.to_json()))) for table in found] == list(found)
    return {table.name.name: table for table in found}


def column(table: Table, name: str) -> Column:
    return next(column for column in table.columns if column.name == name)


def key(table: Table) -> list[str]:
    return [column.name for column in table.key_columns]


def test_types_are_read_with_their_base_type_and_element_type(database: Database) -> None:
    table = tables_of(
        database,
        "CREATE DOMAIN d1 AS numeric(10,2); CREATE DOMAIN d2 AS d1 NOT NULL; CREATE TYPE mood AS ENUM ('a');"
        "CREATE TABLE t (id int PRIMARY KEY, n numeric(5,1)[], d d2, dd d2[], m mood, iv int2vector, b box[]);"
        "CREATE PUBLICATION p FOR TABLE t",
    )["t"]
    numeric = column(table, "n").type
    assert numeric.element is not None
    assert (numeric.element.name, numeric.element.typmod) == ("numeric", (5 << 16 | 1) + 4)
    domain = column(table, "d").type
    assert (domain.family, domain.base) == ("d", PgType(1700, "numeric", (10 << 16 | 2) + 4))
    assert column(table, "dd").type.element == domain
    assert column(table, "m").type.family == "e"
    assert column(table, "iv").type.element is None, (
        "the text of an int2vector has no braces, so it is not read as an array"
    )
    assert column(table, "b").type.delimiter == ";"


def test_catalog_has_attnums_with_gaps_and_the_values_of_added_columns_in_older_rows(database: Database) -> None:
    table = tables_of(
        database,
        "CREATE TABLE t (gone int, id int PRIMARY KEY, late int); INSERT INTO t VALUES (1, 1, 1);"
        "ALTER TABLE t DROP gone, ADD a int DEFAULT 5, ADD b text[] DEFAULT '{x,\"y,z\"}', ADD c int;"
        "CREATE PUBLICATION p FOR TABLE t",
    )["t"]
    assert [column.attnum for column in table.columns] == [2, 3, 4, 5, 6]
    assert table.key == (2,)
    assert [column.missing for column in table.columns] == [None, None, "5", '{x,"y,z"}', None]


@pytest.mark.since(15, "column lists")
def test_comments_of_tables_and_columns_are_returned(database: Database) -> None:
    """A partitioned table has its own comment, not the comments of its partitions. A column's comment is returned if
    the column is published, also if the column's name needs quotes."""
    long = "x" * 100_000
    found = tables_of(
        database,
        """CREATE TABLE t (id int PRIMARY KEY, "Größe 'x'" text, gone int, hidden int, plain int);"""
        "COMMENT ON TABLE t IS E'it''s \\n two lines, \\\\ \"quoted\" ü'; COMMENT ON COLUMN t.gone IS 'gone';"
        """COMMENT ON COLUMN t."Größe 'x'" IS 'höhe'; COMMENT ON COLUMN t.hidden IS 'hidden';"""
        f"COMMENT ON COLUMN t.id IS '{long}'; ALTER TABLE t DROP gone;"
        "COMMENT ON INDEX t_pkey IS 'not the table''s'; COMMENT ON CONSTRAINT t_pkey ON t IS 'nor this';"
        "CREATE TABLE r (id int, v int) PARTITION BY LIST (id); CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1);"
        "CREATE TABLE via (id int, v int) PARTITION BY LIST (id); CREATE TABLE via1 PARTITION OF via FOR VALUES IN (1);"
        "COMMENT ON TABLE r IS 'root'; COMMENT ON TABLE r1 IS 'leaf'; COMMENT ON COLUMN r.v IS 'of the root';"
        "COMMENT ON TABLE via IS 'via'; COMMENT ON COLUMN via1.v IS 'of a leaf';"
        "CREATE TABLE bare (id int PRIMARY KEY); COMMENT ON COLUMN bare.id IS 'x'; COMMENT ON COLUMN bare.id IS NULL;"
        """CREATE PUBLICATION p FOR TABLE t (id, "Größe 'x'", plain), r, bare;"""
        "CREATE PUBLICATION q FOR TABLE via WITH (publish_via_partition_root)",
        "p,q",
    )
    assert found["t"].comments == ((0, 'it\'s \n two lines, \\ "quoted" ü'), (1, long), (2, "höhe"))
    assert found["t"].comment == 'it\'s \n two lines, \\ "quoted" ü'
    assert found["t"].column_comments == {"id": long, "Größe 'x'": "höhe", "plain": None}
    assert found["r"].comments == ((0, "root"), (2, "of the root"))
    assert found["via"].comments == ((0, "via"),)
    assert found["bare"].comments == ()


def test_tables_that_are_read_for_relation_messages_have_no_comments(database: Database) -> None:
    found = tables_of(
        database, "CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t; COMMENT ON TABLE t IS 'x'"
    )
    with connect(database.conninfo) as conn:
        facts = relation_facts(conn, {found["t"].oid: [23]}, ["p"])[found["t"].oid]
    assert facts.table is not None
    assert facts.table.comments == ()
    assert found["t"].without_volatile() == facts.table.without_volatile()


def test_the_key_of_a_table_identifies_its_rows_in_the_stream(database: Database) -> None:
    found = tables_of(
        database,
        "CREATE TABLE plain (a int, b int, PRIMARY KEY (b, a));"
        "CREATE TABLE postponed (id int PRIMARY KEY DEFERRABLE);"
        "CREATE TABLE by_index (id int PRIMARY KEY, k int NOT NULL UNIQUE);"
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_k_key;"
        "CREATE TABLE full_keyed (id int PRIMARY KEY); ALTER TABLE full_keyed REPLICA IDENTITY FULL;"
        "CREATE TABLE full_deferrable (id int PRIMARY KEY DEFERRABLE);"
        "ALTER TABLE full_deferrable REPLICA IDENTITY FULL;"
        "CREATE TABLE bag (a int); ALTER TABLE bag REPLICA IDENTITY FULL;"
        "CREATE TABLE none (id int PRIMARY KEY); ALTER TABLE none REPLICA IDENTITY NOTHING;"
        "CREATE TABLE included (id int, x int, PRIMARY KEY (id) INCLUDE (x));"
        "CREATE TABLE wide (id int PRIMARY KEY, k int NOT NULL, UNIQUE (k, id));"
        "ALTER TABLE wide REPLICA IDENTITY USING INDEX wide_k_id_key;"
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    assert {name: key(table) for name, table in found.items()} == {
        "plain": ["b", "a"], "postponed": [], "by_index": ["k"], "full_keyed": ["id"], "full_deferrable": [],
        "bag": [], "none": [], "included": ["id"], "wide": ["id"],
    }  # fmt: skip
    assert {name for name, table in found.items() if table.multiset} == {"bag", "full_deferrable"}
    assert {name for name, table in found.items() if not table.updates_seen} == {"postponed", "none"}
    assert found["by_index"].identity_key == (2,)
    assert found["wide"].identity_key == (2, 1)


def test_a_replica_identity_index_that_may_not_be_used_is_not_a_key() -> None:
    index = Index(("a",), primary=False, identity=True, usable=False, source=1)
    assert not RowIdentity.of("i", [index]).publishable
    assert mirror_key(RowIdentity.of("i", [index]), [RowIdentity.of("i", [index])], ["a"]) == ()


@pytest.mark.since(15, "row filters and column lists")
@pytest.mark.parametrize(
    ("listed", "uneven"),
    [
        ("p1 WHERE (open), p2", True),
        ("p1 WHERE (open), p2 WHERE (NOT open)", True),
        ("p1 (id, open), p2", True),
        ("p1 WHERE (open), p2 WHERE (open)", False),
        ("p1 (id, open), p2 (open, id)", False),
        ("p1", False),
        ("p", False),
    ],
)
def test_a_table_whose_partitions_are_published_with_different_rows_or_columns_is_not_mirrored(
    database: Database, listed: str, uneven: bool
) -> None:
    """A copy reads all partitions with one row filter and one list of columns."""
    found = tables_of(
        database,
        "CREATE TABLE p (id int, open bool, x int, PRIMARY KEY (id, open)) PARTITION BY HASH (id);"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE p2 PARTITION OF p FOR VALUES WITH (MODULUS 2, REMAINDER 1);"
        f"CREATE PUBLICATION published FOR TABLE {listed}",
        "published",
    )
    reason = refusal(found["p"])
    assert reason is None if not uneven else reason is not None and "partition public.p2 is published with" in reason


@pytest.mark.since(15, "row filters")
@pytest.mark.parametrize(("locked", "second"), [("p1", "NOT open"), ("p2", "NOT open"), ("p2", "open")])
def test_row_filters_of_partitions_are_compared_as_before_while_one_of_them_is_locked(
    database: Database, locked: str, second: str
) -> None:
    """The row filter of a locked partition cannot be read. If the catalog rows that publish the partitions have not
    changed since an earlier reading, the result is the same as then. Otherwise it is not known."""
    ddl = (
        "CREATE TABLE p (id int, open bool, PRIMARY KEY (id, open)) PARTITION BY HASH (id);"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
        "CREATE TABLE p2 PARTITION OF p FOR VALUES WITH (MODULUS 2, REMAINDER 1);"
        f"CREATE PUBLICATION published FOR TABLE p1 WHERE (open), p2 WHERE ({second})"
    )
    before = tables_of(database, ddl, "published")["p"]
    with connect(database.conninfo) as conn, connect(database.conninfo) as other, other.transaction():
        other.execute(f"LOCK TABLE public.{locked} IN ACCESS EXCLUSIVE MODE".encode())
        assert read_tables(conn, ["published"], before=[before]) == (before,)
        with pytest.raises(CopyBlocked, match="is locked, so its row filter cannot be read"):
            read_tables(conn, ["published"])


@pytest.mark.since(15, "row filters and column lists")
def test_column_lists_row_filters_and_operations_of_publications_are_returned(database: Database) -> None:
    with connect(database.conninfo) as conn:
        version = conn.info.server_version
    found = tables_of(
        database,
        "CREATE TABLE cut (id int PRIMARY KEY, secret text, shown text);"
        "CREATE TABLE filtered (id int PRIMARY KEY, x int); CREATE TABLE inserted (id int PRIMARY KEY);"
        "CREATE TABLE generated (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED);"
        "CREATE TABLE unlisted (id int);"
        "CREATE PUBLICATION p FOR TABLE cut (id, shown), filtered WHERE (id > 3 AND id <> 5), generated;"
        "CREATE PUBLICATION q FOR TABLE inserted WITH (publish = 'insert')",
        "p,q",
    )
    assert sorted(found) == ["cut", "filtered", "generated", "inserted"]
    assert [column.name for column in found["cut"].columns] == ["id", "shown"]
    assert found["filtered"].row_filter == "((id > 3) AND (id <> 5))"
    assert [column.name for column in found["generated"].columns] == ["id"]
    assert not found["inserted"].updates_seen
    assert found["inserted"].key == ()
    if version >= 180000:
        with connect(database.conninfo) as conn:
            conn.execute("ALTER PUBLICATION p SET (publish_generated_columns = stored)")
            (table,) = (table for table in read_tables(conn, ["p"]) if table.name.name == "generated")
            assert [(column.name, column.generated) for column in table.columns] == [("id", ""), ("g", "s")]


@pytest.mark.since(15, "row filters")
def test_a_row_filter_does_not_apply_if_another_publication_has_the_table_unfiltered(database: Database) -> None:
    ddl = (
        "CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t WHERE (id > 1);"
        "CREATE PUBLICATION q FOR TABLE t WHERE (id < 0); CREATE PUBLICATION r FOR TABLE t"
    )
    assert tables_of(database, ddl, "p,q")["t"].row_filter == "((id < 0)) OR ((id > 1))"
    with connect(database.conninfo) as conn:
        assert read_tables(conn, ["p", "q", "r"])[0].row_filter is None


PARTITIONED = (
    "CREATE TABLE r (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);"
    "CREATE TABLE r_n PARTITION OF r FOR VALUES IN ('n');"
    "CREATE TABLE r_s (gone int, v text, region text NOT NULL, id int NOT NULL);"
    "ALTER TABLE r_s DROP gone; ALTER TABLE r ATTACH PARTITION r_s FOR VALUES IN ('s');"
    "CREATE TABLE r_x PARTITION OF r FOR VALUES IN ('x', 'y') PARTITION BY LIST (region);"
    "CREATE TABLE r_xx PARTITION OF r_x FOR VALUES IN ('x');"
)


def test_a_partitioned_table_lists_its_leaves(database: Database) -> None:
    found = tables_of(database, PARTITIONED + "CREATE PUBLICATION p FOR TABLE r")
    assert list(found) == ["r"]
    root = found["r"]
    assert root.partitioned
    assert [leaf.name.name for leaf in root.leaves] == ["r_n", "r_s", "r_xx"]
    assert key(root) == ["id", "region"]
    via_root = tables_of(database, "CREATE PUBLICATION v FOR TABLE r WITH (publish_via_partition_root)", "v")["r"]
    assert (via_root.leaves, via_root.key) == (
        tuple(replace(leaf, files=replace(leaf.files, traceless=True)) for leaf in root.leaves),
        root.key,
    )


def test_a_leaf_that_is_read_for_relation_messages_has_its_attnums_and_the_roots_key(database: Database) -> None:
    tables_of(database, PARTITIONED + "CREATE PUBLICATION p FOR TABLE r")
    with connect(database.conninfo) as conn:
        row = conn.execute("SELECT 'public.r_s'::regclass::oid, 'public.r'::regclass::oid").fetchone()
        assert row is not None
        found = relation_facts(conn, {row[0]: [23, 25, 999_999], 999_999: [23]}, ["p"])
        facts = found[row[0]]
        assert facts.table is not None
        assert (facts.table.name.name, facts.table.root) == ("r_s", TableName("public", "r"))
        assert facts.table.mirror == TableName("public", "r")
        assert {column.name: column.attnum for column in facts.table.columns} == {"v": 2, "region": 3, "id": 4}
        assert facts.table.key == (4, 3)
        assert {oid: type_.name for oid, type_ in facts.types.items()} == {23: "int4", 25: "text"}
        assert found[999_999].table is None


def test_columns_are_read_for_relation_messages_of_tables_that_are_not_published(database: Database) -> None:
    tables_of(database, "CREATE TABLE t (a int, id int PRIMARY KEY); CREATE PUBLICATION p")
    with connect(database.conninfo) as conn:
        row = conn.execute("SELECT 'public.t'::regclass::oid").fetchone()
        assert row is not None
        table = relation_facts(conn, {row[0]: [23]}, ["p"])[row[0]].table
        assert table is not None
        assert [column.attnum for column in table.columns] == [1, 2]


def test_a_root_without_a_key_is_a_multiset_only_if_every_leaf_sends_whole_rows(database: Database) -> None:
    found = tables_of(
        database,
        "CREATE TABLE bag (id int) PARTITION BY LIST (id); CREATE TABLE bag1 PARTITION OF bag FOR VALUES IN (1);"
        "ALTER TABLE bag1 REPLICA IDENTITY FULL;"
        "CREATE TABLE mixed (id int) PARTITION BY LIST (id); CREATE TABLE mixed1 PARTITION OF mixed FOR VALUES IN (1);"
        "CREATE TABLE mixed2 PARTITION OF mixed FOR VALUES IN (2); ALTER TABLE mixed1 REPLICA IDENTITY FULL;"
        "ALTER TABLE mixed2 ADD PRIMARY KEY (id); ALTER TABLE mixed REPLICA IDENTITY FULL;"
        "CREATE PUBLICATION p FOR TABLE bag, mixed",
    )
    assert found["bag"].multiset
    assert found["bag"].updates_seen
    assert not found["mixed"].multiset
    assert not found["mixed"].updates_seen, "a key that only one leaf has is not a key of the root"


def test_tables_with_odd_names_and_tables_of_several_schemas_are_read(database: Database) -> None:
    ddl = (
        'CREATE SCHEMA "Odd Schema"; CREATE SCHEMA other; CREATE TABLE t (id int PRIMARY KEY);'
        'CREATE TABLE other.t (id int PRIMARY KEY); CREATE TABLE "Odd Schema"."Select {} %s" ("a.b ☃" int PRIMARY KEY);'
        "CREATE PUBLICATION p FOR ALL TABLES"
    )
    tables_of(database, ddl)
    with connect(database.conninfo) as conn:
        found = read_tables(conn, ["p"])
        assert [(t.name.schema, t.name.name) for t in found] == [
            ("Odd Schema", "Select {} %s"), ("other", "t"), ("public", "t"),
        ]  # fmt: skip
        assert [t.name.schema for t in read_tables(conn, ["p"], ["t", '"Odd Schema".*', '-*."Select*"'])] == [
            "Odd Schema", "public",
        ]  # fmt: skip
        assert [str(t.name) for t in read_tables(conn, ["p"], ["-Odd?Schema.*"])] == ["other.t", "public.t"]


@pytest.mark.parametrize(
    ("patterns", "name", "meant"),
    [
        ([], "public.t", True), (["t"], "public.t", True), (["t"], "other.t", False), (["*.t"], "other.t", True),
        (["public.a*", "-public.ab"], "public.ab", False), (["public.a*", "-public.ab"], "public.abc", True),
        (["-public.*"], "other.x", True), (["public.a?"], "public.a", False), (['"A.b".c'], '"A.b".c', True),
        (["public.T"], "public.t", False), (['public."*"'], "public.t", False), (["public.[t]"], "public.t", False),
    ],
)  # fmt: skip
def test_patterns_match_table_names(patterns: list[str], name: str, meant: bool) -> None:
    assert TablePatterns.parse(patterns).match(TableName.parse(name)) is meant


@pytest.mark.parametrize("pattern", ["", "-", "a.b.c", 'a."b'])
def test_the_error_for_an_invalid_pattern_names_the_setting(pattern: str) -> None:
    with pytest.raises(SettingsError, match="tables"):
        TablePatterns.parse([pattern])


def test_attnums_of_leaves_are_mapped_to_the_attnums_of_the_root(database: Database) -> None:
    """A partition made by CREATE TABLE ... PARTITION OF has the root's attnums, unless a column of the root was dropped
    before. An attached table keeps its own attnums."""
    ddl = """
      CREATE TABLE r (id int, a int, b int, PRIMARY KEY (id)) PARTITION BY LIST (id);
      CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1); CREATE TABLE r2 (a int, id int PRIMARY KEY, b int);
      CREATE TABLE r3 (z int, id int PRIMARY KEY, a int, y int, x int, b int, c int);
      ALTER TABLE r3 DROP z, DROP y, DROP x, DROP c;
      ALTER TABLE r ATTACH PARTITION r2 FOR VALUES IN (2); ALTER TABLE r ATTACH PARTITION r3 FOR VALUES IN (3);
      CREATE PUBLICATION p FOR TABLE r; CREATE PUBLICATION v FOR TABLE r WITH (publish_via_partition_root)
    """
    odd = ((2, -1), (6, -3), (8, -4))
    r = tables_of(database, ddl)["r"]
    assert [leaf.numbering for leaf in r.leaves] == [((1, 0),), None, odd]
    changed = "ALTER TABLE r ADD c int DEFAULT 5; ALTER TABLE r DROP a; ALTER TABLE r ADD a text"
    r = tables_of(database, changed)["r"]
    first, second, third = r.leaves
    assert r.attnums_given == r.highest_attnum == 5
    assert first.numbering == ((1, 0),)
    assert second.numbering == ((2, -1), (3, 0)), "the column whose attnum differed was dropped"
    assert third.numbering == odd
    assert [third.at_root(attnum) for attnum in (2, 6, 8, 9)] == [1, 3, 4, 5] == list(r.live)
    assert [third.of_root(attnum) for attnum in r.live] == [2, 6, 8, 9]
    r = tables_of(database, "CREATE TABLE r5 PARTITION OF r FOR VALUES IN (5); ALTER TABLE r DROP a")["r"]
    assert (r.leaves[-1].numbering, column(r, "c").missing) == (((1, 0), (2, 1)), "5")
    via_root = tables_of(database, "", "v")["r"]
    assert [leaf.numbering for leaf in via_root.leaves] == [leaf.numbering for leaf in r.leaves]
