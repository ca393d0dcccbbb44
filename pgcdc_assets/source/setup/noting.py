"""The functions behind the event triggers: what they look at, and what they say of a table.

A statement that touches nothing of ours costs one query of the catalog by its indexes. A message is JSON, in UTF-8
whatever the database's encoding is:

    {"tag": "ALTER TABLE", "tables": [{...}], "rewritten": null, "cast": false}

``tables`` are the published tables that the statement touched, as they are after it
(:mod:`pgcdc_assets.source.catalog.noted` reads them). None is named where partitions, publications, schemas or types
were touched: then the catalog is to be looked at. ``rewritten`` is the OID of a table whose rows the statement writes
anew; that has a message of its own, ahead of the other. ``cast``: it does so for other types alone, by PostgreSQL's own
casts. That is said of a query that is one ALTER TABLE, for it alone shows whether there is a USING.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from pgcdc_assets.source.catalog.bare import LISTS_SINCE

_SAFE: Final = "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp"
_PLAIN: Final = "LANGUAGE sql SET search_path = pg_catalog, pg_temp"
_TEXTS: Final = (
    "LANGUAGE sql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' "
    "SET intervalstyle = 'postgres' SET extra_float_digits = 1 SET bytea_output = 'hex'"
)
"""One text form of the values that older rows have, whatever the session's is. Only where there is something to say:
each setting costs a microsecond."""

_PUBLISHED: LiteralString = """
EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
        WHERE r.prrelid = c.oid AND p.pubname = ANY({names}))
OR EXISTS (SELECT FROM pg_publication p WHERE p.puballtables AND p.pubname = ANY({names}))
"""
_PUBLISHED_BY_SCHEMA: LiteralString = """
OR EXISTS (SELECT FROM pg_publication_namespace s JOIN pg_publication p ON p.oid = s.pnpubid
           WHERE s.pnnspid = c.relnamespace AND p.pubname = ANY({names}))
"""
# Children of a table that is inherited from change with it, and only it is named. What is done to partitions is
# followed by the catalog alone: it is looked at.
_CHANGED: LiteralString = """
DECLARE ours oid[]; look boolean;
BEGIN
  WITH RECURSIVE touched (oid) AS (
    SELECT objid FROM pg_event_trigger_ddl_commands() WHERE classid = 'pg_class'::regclass
    UNION SELECT i.inhrelid FROM touched JOIN pg_class parent ON parent.oid = touched.oid AND parent.relkind = 'r'
      JOIN pg_inherits i ON i.inhparent = parent.oid
  ), relations AS (
    SELECT c.oid, c.relkind = 'p' OR c.relispartition AS parted, ({published}) AS published
    FROM touched JOIN pg_class c ON c.oid = touched.oid WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
  )
  SELECT array_agg(oid) FILTER (WHERE published AND NOT parted), coalesce(bool_or(parted), false)
  INTO ours, look FROM relations;
  IF ours IS NOT NULL OR look OR tg_tag NOT LIKE ALL ('{{%TABLE,%TABLE AS,SELECT INTO,CREATE SCHEMA}}') THEN
    PERFORM {schema}.emit(tg_tag, ours, NULL, false);
  END IF;
EXCEPTION WHEN OTHERS THEN
  RAISE WARNING 'pgcdc: a change of structure is not noted in the stream: % (%)', SQLERRM, SQLSTATE;
END
"""
_DROPPED: LiteralString = """
DECLARE ours oid[]; look boolean;
BEGIN
  WITH gone AS (SELECT * FROM pg_event_trigger_dropped_objects() WHERE NOT is_temporary), left_ AS (
    SELECT DISTINCT c.oid FROM gone JOIN pg_class c ON c.oid = gone.objid
    WHERE gone.object_type = 'table column' AND c.relkind = 'r' AND ({published})
  )
  SELECT (SELECT array_agg(oid) FROM left_),
         EXISTS (SELECT FROM gone WHERE object_type IN ('publication relation', 'publication namespace')
                 AND address_args && {names}) OR
         EXISTS (SELECT FROM gone WHERE object_type = 'publication' AND object_name = ANY({names})) OR
         EXISTS (SELECT FROM gone, pg_publication p WHERE gone.object_type = 'table'
                 AND p.puballtables AND p.pubname = ANY({names}))
  INTO ours, look;
  IF ours IS NOT NULL OR look THEN
    PERFORM {schema}.emit(tg_tag, ours, NULL, false);
  END IF;
EXCEPTION WHEN OTHERS THEN
  RAISE WARNING 'pgcdc: a change of structure is not noted in the stream: % (%)', SQLERRM, SQLSTATE;
END
"""
# 4 is AT_REWRITE_COLUMN_REWRITE: neither a default nor anything else made it write the rows.
_REWRITTEN: LiteralString = """
BEGIN
  PERFORM {schema}.emit(tg_tag, NULL, c.oid, pg_event_trigger_table_rewrite_reason() = 4
    AND current_query() ~* '^\\s*alter\\s+table\\s[^;]*;?\\s*$' AND current_query() !~* '\\yusing\\y') FROM pg_class c
  WHERE c.oid = pg_event_trigger_table_rewrite_oid() AND NOT c.relispartition AND ({published});
EXCEPTION WHEN OTHERS THEN
  RAISE WARNING 'pgcdc: a change of structure is not noted in the stream: % (%)', SQLERRM, SQLSTATE;
END
"""
_EMIT: LiteralString = """
SELECT pg_logical_emit_message(true, {prefix}, convert_to(json_build_object(
  'tag', tag, 'tables', coalesce((SELECT json_agg({schema}.facts(oid)) FROM unnest(tables) AS oid), '[]'),
  'rewritten', rewritten::int8, 'cast', by_cast
)::text, 'UTF8'))
"""
# A column's row is ``own`` if this transaction has written it. Of all that can be read, only own rows are of a
# transaction that has not ended. An xid that is older than the transaction's is none of its own.
_FACTS: LiteralString = """
WITH RECURSIVE me (top, later) AS (
  SELECT pg_current_xact_id()::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8
), columns AS (
  SELECT a.*, a.xmin::text AS written, (a.xmin::text::int8 - me.top) & 4294967295 AS distance
  FROM pg_attribute a, me WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
), types (oid) AS (
  SELECT atttypid FROM columns
  UNION SELECT more.oid FROM types JOIN pg_type t ON t.oid = types.oid LEFT JOIN pg_type e ON e.oid = t.typelem,
    LATERAL (VALUES (CASE WHEN t.typtype = 'd' THEN t.typbasetype END), (CASE WHEN e.typarray = t.oid THEN e.oid END))
      AS more (oid) WHERE more.oid IS NOT NULL
)
SELECT json_build_object(
  'oid', c.oid::int8, 'schema', n.nspname, 'name', c.relname, 'identity', c.relreplident,
  'relfilenode', c.relfilenode::int8, 'toast', c.reltoastrelid::int8, 'listed', {listed},
  'columns', (SELECT json_agg(json_build_array(attnum, attname, atttypid::int8, atttypmod, attnotnull, attgenerated,
      CASE WHEN atthasmissing THEN (attmissingval::text::text[])[1] END, attnum || ':' || written,
      CASE WHEN distance >= 2147483648 THEN false WHEN me.top + distance >= me.later THEN true
           ELSE pg_xact_status((me.top + distance)::text::xid8) = 'in progress' END) ORDER BY attnum)
    FROM columns, me),
  'indexes', (SELECT coalesce(json_agg(json_build_array(i.indisprimary, i.indisreplident,
      i.indisvalid AND i.indisready AND i.indislive AND i.indisunique AND i.indimmediate
        AND i.indpred IS NULL AND i.indexprs IS NULL,
      ARRAY(SELECT a.attname::text
            FROM unnest(string_to_array(i.indkey::text, ' ')::int2[]) WITH ORDINALITY AS k (attnum, place)
            JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
            WHERE k.place <= i.indnkeyatts ORDER BY k.place))), '[]')
    FROM pg_index i WHERE i.indrelid = c.oid AND (i.indisprimary OR i.indisreplident)),
  'types', (SELECT json_agg(json_build_array(t.oid::int8, t.typname, t.typtype, t.typdelim,
      CASE WHEN t.typtype = 'd' THEN t.typbasetype::int8 ELSE 0 END, t.typtypmod,
      CASE WHEN e.typarray = t.oid THEN e.oid::int8 ELSE 0 END))
    FROM types JOIN pg_type t ON t.oid = types.oid LEFT JOIN pg_type e ON e.oid = t.typelem)
)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation
"""
_LISTED: LiteralString = """
EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
        WHERE r.prrelid = c.oid AND p.pubname = ANY({names}) AND r.prattrs IS NOT NULL)
"""


def bodies(
    conn: psycopg.Connection[Any], schema: str, prefix: str, publications: Sequence[str]
) -> Iterator[tuple[LiteralString, LiteralString, sql.Literal]]:
    """Head, options and body of each function. ``facts`` and ``emit`` come before those that call them."""
    lists = conn.info.server_version >= LISTS_SINCE
    given = {
        "schema": sql.Identifier(schema),
        "prefix": sql.Literal(prefix),
        "names": sql.SQL("{}::text[]").format(sql.Literal(list(publications))),
    }
    given["published"] = sql.SQL(_PUBLISHED + (_PUBLISHED_BY_SCHEMA if lists else "")).format(**given)
    given["listed"] = sql.SQL(_LISTED if lists else "false").format(**given)
    for head, how, text in (
        ("facts (relation oid) RETURNS json", _TEXTS, _FACTS),
        ("emit (tag text, tables oid[], rewritten oid, by_cast boolean) RETURNS pg_lsn", _PLAIN, _EMIT),
        ("changed () RETURNS event_trigger", _SAFE, _CHANGED),
        ("dropped () RETURNS event_trigger", _SAFE, _DROPPED),
        ("rewritten () RETURNS event_trigger", _SAFE, _REWRITTEN),
    ):  # fmt: skip
        yield head, how, sql.Literal(sql.SQL(text).format(**given).as_string(conn))
