"""The sample shop in a database: its tables and first rows, the actions of its customers and programs, and a generator
that lets several customers act at the same time, at a given rate."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
from psycopg import sql

from pgcdc_assets.demo.server import EmbeddedServer

DATABASE = "shop"

_LOCK = 0x73686F70
"""Key of an advisory lock ('shop' in ASCII). It keeps two commands from filling the empty database at the same time."""


def server(state: Path) -> EmbeddedServer:
    """The embedded server of a project, running or not. ``state``: the project's state folder."""
    return EmbeddedServer(state.absolute() / "postgres", database=DATABASE)


def ensure(conninfo: str) -> bool:
    """Creates and fills the shop's tables (about 35,000 rows) in one transaction, if they are missing. Returns whether
    they were missing."""
    with psycopg.connect(conninfo, application_name="shop") as conn:
        conn.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        if conn.execute("SELECT to_regclass('public.order_lines')").fetchone() != (None,):
            return False
        conn.execute("SELECT set_config('shop.scale', '1', true)")
        conn.execute(files(__package__).joinpath("shop.sql").read_bytes())
        return True


Conn: TypeAlias = psycopg.Connection[tuple[Any, ...]]
Action: TypeAlias = Callable[["Shop", Conn], None]

_WORDS = ("blue", "green", "ümlaut", "naïve", "日本語", "🐘", "tab\there", 'quo"te', "back\\slash", "comma,", "")


@dataclass(frozen=True)
class Shop:
    """The shop's actions. Each method runs the statements of one transaction, and the caller commits. With the same
    state of ``random``, the actions make the same choices."""

    random: random.Random

    # Everyday writes ----------------------------------------------------------------------------

    def order(self, conn: Conn) -> None:
        """A customer orders one to five things. The order's total is then updated in the row that was just inserted."""
        customer = self._pick(conn, "customers")
        if customer is None:
            return
        (order,) = _row(
            conn.execute(
                "INSERT INTO orders (customer_id, note) VALUES (%s, %s) RETURNING id", [customer, self._note()]
            )
        )
        for line in range(1, self.random.randint(2, 6)):
            conn.execute(
                "INSERT INTO order_lines (order_id, line, sku, quantity, price) "
                "SELECT %s, %s, sku, %s, price FROM products WHERE active ORDER BY md5(sku || %s::text) LIMIT 1",
                [order, line, self.random.randint(1, 9), self.random.random()],
            )
        conn.execute(
            "UPDATE orders SET total = (SELECT coalesce(sum(quantity * price), 0) FROM order_lines "
            "WHERE order_id = orders.id) WHERE id = %s", [order],
        )  # fmt: skip

    def pay(self, conn: Conn) -> None:
        """An order's status changes, and a payment is inserted. The order's long note, which is stored out of line,
        does not change, so the stream does not contain it."""
        order = self._pick(conn, "orders")
        conn.execute("UPDATE orders SET status = 'paid' WHERE id = %s", [order])
        conn.execute(
            "INSERT INTO payments (paid_on, order_id, amount, method, details) VALUES (%s, %s, %s, %s, %s)",
            [self._day(), order, round(self.random.uniform(1, 900), 2), self.random.choice(["card", "cash"]),
             json.dumps({"reference": self._word()})],
        )  # fmt: skip

    def deliver(self, conn: Conn) -> None:
        conn.execute(
            "UPDATE orders SET status = 'delivered', delivery = now() - placed_at WHERE id = %s",
            [self._pick(conn, "orders")],
        )

    def register(self, conn: Conn) -> None:
        conn.execute(
            "INSERT INTO customers (email, name, tags, address, born) VALUES (%s, %s, %s, %s, %s)",
            [f"{uuid.UUID(int=self.random.getrandbits(128))}@example.com", self._word(), [self._word(), None],
             json.dumps({"city": self._word()}), self._day()],
        )  # fmt: skip

    def promote(self, conn: Conn) -> None:
        """Several updates of one row in one transaction."""
        customer = self._pick(conn, "customers")
        for tier in ("regular", "gold"):
            conn.execute("UPDATE customers SET tier = %s, credit = credit + 1.25 WHERE id = %s", [tier, customer])

    def reprice(self, conn: Conn) -> None:
        """Several rows change. Their descriptions, which are stored out of line, do not change, so the stream does not
        contain them."""
        conn.execute(
            "UPDATE products SET price = round(price * 1.01, 2), changed_at = now() WHERE sku IN "
            "(SELECT sku FROM products WHERE price < 100000 ORDER BY md5(sku || %s::text) LIMIT 10 FOR UPDATE)",
            [self.random.random()],
        )

    def describe(self, conn: Conn) -> None:
        """A long text changes."""
        text = " ".join(self._word() for _ in range(1500))
        conn.execute("UPDATE products SET description = %s WHERE sku = %s", [text, self._sku(conn)])

    def view(self, conn: Conn) -> None:
        """Several events are inserted. Some of them can be equal rows."""
        session = uuid.UUID(int=self.random.getrandbits(9))
        for _ in range(self.random.randint(1, 6)):
            conn.execute(
                "INSERT INTO events (kind, session, duration, payload) VALUES ('view', %s, %s, '{\"page\": 1}')",
                [session, self.random.random()],
            )

    def fill_cart(self, conn: Conn) -> None:
        conn.execute(
            "INSERT INTO carts (session, items) VALUES (%s, %s) ON CONFLICT (session) DO UPDATE SET "
            "items = carts.items || excluded.items, seen_at = now()",
            [uuid.UUID(int=self.random.getrandbits(10)), json.dumps([self._word()])],
        )

    # Rarer writes ---------------------------------------------------------------------------------

    def renumber(self, conn: Conn) -> None:
        """The key of a product changes, and the order lines that refer to it change too. The product's long description
        does not change, so the stream does not contain it."""
        conn.execute(
            "UPDATE products SET sku = %s WHERE sku = %s", [f"N-{self.random.getrandbits(48):x}", self._sku(conn)]
        )

    def merge_orders(self, conn: Conn) -> None:
        """Order lines move to another order. This changes a key of two columns."""
        one, other = self._pick(conn, "orders"), self._pick(conn, "orders")
        conn.execute(
            "UPDATE order_lines SET order_id = %s, line = line + "
            "(SELECT coalesce(max(line), 0) FROM order_lines WHERE order_id = %s) WHERE order_id = %s",
            [one, one, other],
        )

    def swap_lines(self, conn: Conn) -> None:
        """Two rows exchange their keys in one transaction. The first row temporarily gets a third key."""
        order = self._pick(conn, "orders")
        for old, new in ((1, -1), (2, 1), (-1, 2)):
            conn.execute("UPDATE order_lines SET line = %s WHERE order_id = %s AND line = %s", [new, order, old])

    def postpone(self, conn: Conn) -> None:
        """A payment gets another date, which may move it to another partition."""
        payment = self._pick(conn, "payments")
        conn.execute("UPDATE payments SET paid_on = %s WHERE id = %s", [self._day(), payment])

    def cancel(self, conn: Conn) -> None:
        """An order is deleted. The delete cascades to other tables."""
        conn.execute("DELETE FROM orders WHERE id = %s", [self._pick(conn, "orders")])

    def replace_order(self, conn: Conn) -> None:
        """An order is deleted and inserted again under the same key."""
        found = conn.execute(
            "DELETE FROM orders WHERE id = %s RETURNING id, customer_id", [self._pick(conn, "orders")]
        ).fetchone()
        if found:
            conn.execute("INSERT INTO orders (id, customer_id, note) VALUES (%s, %s, 'again')", list(found))

    def forget_events(self, conn: Conn) -> None:
        """Some events are deleted and some are changed. Several of them may be equal rows."""
        conn.execute(
            "DELETE FROM events WHERE ctid = ANY(ARRAY(SELECT ctid FROM events LIMIT 3 FOR UPDATE SKIP LOCKED))"
        )
        conn.execute(
            "UPDATE events SET kind = 'kept' WHERE ctid = ANY(ARRAY(SELECT ctid FROM events WHERE kind = 'click' "
            "LIMIT 2 FOR UPDATE SKIP LOCKED))"
        )

    def savepoint(self, conn: Conn) -> None:
        """A subtransaction is rolled back inside a transaction that commits."""
        conn.execute("INSERT INTO events (kind) VALUES ('before')")
        with conn.transaction() as inner:
            conn.execute("INSERT INTO events (kind) VALUES ('never seen')")
            raise psycopg.Rollback(inner)

    def empty_carts(self, conn: Conn) -> None:
        conn.execute("TRUNCATE carts")
        conn.execute(
            "INSERT INTO carts (session, items) VALUES (%s, '[\"first\"]')",
            [uuid.UUID(int=self.random.getrandbits(10))],
        )

    def import_events(self, conn: Conn, rows: int) -> None:
        """Many rows are inserted in one large transaction."""
        conn.execute(
            "INSERT INTO events (kind, session, duration) SELECT 'import', md5(g::text)::uuid, g FROM "
            "generate_series(1, %s) AS g", [rows],
        )  # fmt: skip
        conn.execute("UPDATE customers SET credit = credit + 0.5 WHERE mod(id, 3) = 0")

    # Choices ----------------------------------------------------------------------------------------

    def _pick(self, conn: Conn, table: str) -> Any:
        """The id of a random row, found through the index. None if the table is empty."""
        query = sql.SQL("SELECT id FROM {t} WHERE id >= %s * (SELECT max(id) FROM {t}) ORDER BY id LIMIT 1")
        row = conn.execute(query.format(t=sql.Identifier(table)), [self.random.random()]).fetchone()
        return row[0] if row else None

    def _sku(self, conn: Conn) -> Any:
        found = conn.execute("SELECT sku FROM products ORDER BY md5(sku || %s::text) LIMIT 1", [self.random.random()])
        return _row(found)[0]

    def _day(self) -> str:
        return f"{self.random.randint(2024, 2026)}-{self.random.randint(1, 12):02}-{self.random.randint(1, 28):02}"

    def _note(self) -> str | None:
        kind = self.random.random()
        if kind < 0.5:
            return None
        return self._word() if kind < 0.8 else "\n".join(self._word() for _ in range(1200))

    def _word(self) -> str:
        return self.random.choice(_WORDS) + f"{self.random.getrandbits(16):x}"


def _row(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    row = cursor.fetchone()
    assert row is not None
    return row


WEIGHTS: tuple[tuple[int, Action], ...] = (
    (20, Shop.order), (16, Shop.pay), (10, Shop.deliver), (6, Shop.register), (6, Shop.promote), (4, Shop.reprice),
    (3, Shop.describe), (16, Shop.view), (8, Shop.fill_cart), (2, Shop.renumber), (2, Shop.merge_orders),
    (2, Shop.swap_lines), (4, Shop.postpone), (2, Shop.cancel), (2, Shop.replace_order), (4, Shop.forget_events),
    (3, Shop.savepoint),
)  # fmt: skip
"""How often each action happens, relative to the other actions."""

# The generator ----------------------------------------------------------------------------------------

_CONNECTIONS = 4
_ROLLED_BACK = 0.05
"""The share of transactions that the generator rolls back on purpose."""
_LARGE_AFTER, _LARGE_EVERY, _LARGE_ROWS = 3.0, 60.0, 20_000
_TRUNCATE_AFTER, _TRUNCATE_EVERY = 5.0, 15.0
"""Seconds before the first TRUNCATE, and between two of them. They are short, so that even a short demo contains a
TRUNCATE."""
_TRUNCATE_OFTEN, _TRUNCATE_LATER = 60.0, 60.0
"""Seconds after which TRUNCATE becomes rare, and seconds between two of them after that. A copy or a comparison of the
table starts again after each TRUNCATE. On a slow machine, this takes longer than _TRUNCATE_EVERY, so it would never end
if TRUNCATE stayed frequent."""

_LOSSES = (
    psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable, psycopg.errors.UniqueViolation,
    psycopg.errors.ForeignKeyViolation, psycopg.errors.SerializationFailure,
)  # fmt: skip
"""Errors that concurrent writers cause for each other. The session rolls back and begins its next transaction."""


class Generator:
    """Runs ``rate`` transactions per second, in a few sessions, until it is stopped. Each session has its own random
    numbers with a fixed seed. So two runs do similar things, but in a different order, because the order depends on how
    the sessions interleave."""

    def __init__(self, conninfo: str, rate: float) -> None:
        if rate <= 0:
            raise ValueError("rate must be positive")
        self._conninfo = conninfo
        self._rate = rate
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.transactions = 0
        """Committed transactions."""

    def stop(self) -> None:
        """Makes :meth:`run` return after the transactions in progress. May be called from any thread."""
        self._stop.set()

    def run(self) -> None:
        """Writes to the shop until :meth:`stop` is called or a session fails. Raises the first error of a session."""
        sessions = [
            threading.Thread(target=self._session, args=(number,), name=f"shop-{number}", daemon=True)
            for number in range(_CONNECTIONS)
        ]
        for session in sessions:
            session.start()
        self._stop.wait()
        for session in sessions:
            session.join()
        if self._error is not None:
            raise self._error

    def _session(self, number: int) -> None:
        try:
            with psycopg.connect(
                self._conninfo, application_name=f"shop-{number}", autocommit=True,
                # TRUNCATE must not wait long for its lock, because all other sessions would queue behind it.
                options="-c lock_timeout=500ms -c search_path=public",
            ) as conn:  # fmt: skip
                self._work(conn, random.Random(f"1:{number}"), number)
        except BaseException as error:  # noqa: BLE001 (raised again by run)
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _work(self, conn: Conn, rng: random.Random, number: int) -> None:
        shop = Shop(rng)
        weights = [weight for weight, _ in WEIGHTS]
        started = due = time.monotonic()
        large, truncate = started + _LARGE_AFTER, started + _TRUNCATE_AFTER
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += rng.expovariate(self._rate / _CONNECTIONS)
            now = time.monotonic()
            if number == 0 and now > large:
                large = now + _LARGE_EVERY
                self._transaction(conn, rng, partial(shop.import_events, rows=_LARGE_ROWS), keep=True)
            elif number == _CONNECTIONS - 1 and now > truncate:
                truncate = now + (_TRUNCATE_EVERY if now < started + _TRUNCATE_OFTEN else _TRUNCATE_LATER)
                self._transaction(conn, rng, shop.empty_carts, keep=True)
            else:
                action = rng.choices(WEIGHTS, weights)[0][1]
                self._transaction(conn, rng, partial(action, shop))

    def _transaction(self, conn: Conn, rng: random.Random, work: Callable[[Conn], None], *, keep: bool = False) -> None:
        committed = False
        try:
            with conn.transaction() as scope:
                work(conn)
                if not keep and rng.random() < _ROLLED_BACK:
                    raise psycopg.Rollback(scope)
                committed = True
        except _LOSSES:
            committed = False
        with self._lock:
            self.transactions += committed
