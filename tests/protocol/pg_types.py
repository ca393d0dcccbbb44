"""PostgreSQL types as the catalog describes them."""

from __future__ import annotations

from dataclasses import replace

from pgcdc_assets.core.catalog import PgType


def numeric(precision: int, scale: int) -> PgType:
    return PgType(1700, "numeric", (precision << 16 | scale & 0x7FF) + 4)


def array(element: PgType, oid: int = 99_999) -> PgType:
    """The array type of this element type. The typmod belongs to the array, as in atttypmod."""
    return PgType(oid, f"_{element.name}", element.typmod, element=replace(element, typmod=-1))


def domain(base: PgType, oid: int = 88_888) -> PgType:
    return PgType(oid, "domain", family="d", base=base)


BOOL, BYTEA = PgType(16, "bool"), PgType(17, "bytea")
INT2, INT4, INT8 = PgType(21, "int2"), PgType(23, "int4"), PgType(20, "int8")
FLOAT4, FLOAT8 = PgType(700, "float4"), PgType(701, "float8")
NUMERIC, MONEY = PgType(1700, "numeric"), PgType(790, "money")
DATE, TIMESTAMP, TIMESTAMPTZ = PgType(1082, "date"), PgType(1114, "timestamp"), PgType(1184, "timestamptz")
TIME, TIMETZ, INTERVAL = PgType(1083, "time"), PgType(1266, "timetz"), PgType(1186, "interval")
TEXT, BPCHAR, UUID, JSONB = PgType(25, "text"), PgType(1042, "bpchar", 9), PgType(2950, "uuid"), PgType(3802, "jsonb")
ENUM, COMPOSITE = PgType(16_400, "mood", family="e"), PgType(16_401, "pair", family="c")
INT2VECTOR = PgType(22, "int2vector", element=INT2)
BOX = PgType(603, "box")
