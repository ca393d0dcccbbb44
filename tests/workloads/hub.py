"""A hub for many tenants as in Hibernate and Prisma: uuid keys and a shared sequence, optimistic versions, soft
deletes, enums and arrays, audit triggers, an outbox, a queue of jobs, events in monthly partitions."""

from __future__ import annotations

import json

from psycopg import errors

from tests.workloads.application import Application, Invariant, Migration, RolledBack, Session

MODEL = """
CREATE SCHEMA hub;
CREATE SCHEMA audit;
CREATE TYPE hub.plan AS ENUM ('free', 'team', 'company');
CREATE TYPE hub.job_state AS ENUM ('queued', 'done', 'failed');
CREATE TYPE hub.address AS (street text, city text);
CREATE DOMAIN hub.email AS varchar(254) CHECK (VALUE LIKE '%@%');
CREATE SEQUENCE hub.hibernate_sequence INCREMENT BY 50;
CREATE TABLE hub.tenant (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), name varchar(255) NOT NULL,
  plan hub.plan NOT NULL DEFAULT 'free', seats int4range, home hub.address);
CREATE TABLE hub.account (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), tenant_id uuid NOT NULL REFERENCES hub.tenant,
  email hub.email NOT NULL, labels text[] NOT NULL DEFAULT '{}', version integer NOT NULL DEFAULT 0,
  "createdAt" timestamptz(3) NOT NULL DEFAULT now(), "deletedAt" timestamptz(3), UNIQUE (tenant_id, email));
CREATE TABLE hub.task (id bigint PRIMARY KEY, tenant_id uuid NOT NULL REFERENCES hub.tenant ON DELETE CASCADE,
  title varchar(200) NOT NULL, body text, version integer NOT NULL DEFAULT 0,
  words tsvector GENERATED ALWAYS AS (to_tsvector('simple', title)) STORED);
CREATE INDEX task_words ON hub.task USING gin (words);
CREATE TABLE hub.assignee (tenant_id uuid, task_id bigint REFERENCES hub.task ON DELETE CASCADE, account_id uuid,
  PRIMARY KEY (tenant_id, task_id, account_id));
CREATE TABLE hub.wallet (tenant_id uuid PRIMARY KEY REFERENCES hub.tenant, balance bigint NOT NULL DEFAULT 0);
CREATE TABLE hub.entry (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant_id uuid NOT NULL,
  amount bigint NOT NULL);
CREATE TABLE hub.usage (tenant_id uuid, day date, calls bigint NOT NULL DEFAULT 0, bytes numeric,
  PRIMARY KEY (day, tenant_id));
CREATE TABLE hub.outbox (id bigint PRIMARY KEY, topic varchar(80) NOT NULL, payload jsonb NOT NULL);
CREATE TABLE hub.job (id bigserial PRIMARY KEY, state hub.job_state NOT NULL DEFAULT 'queued',
  attempts int NOT NULL DEFAULT 0, run_at timestamptz NOT NULL DEFAULT now(), arguments json NOT NULL);
CREATE TABLE hub.raw_call (tenant_id uuid, at timestamptz, path text);
ALTER TABLE hub.raw_call REPLICA IDENTITY FULL;
CREATE TABLE hub.event (id uuid NOT NULL DEFAULT gen_random_uuid(), at timestamptz NOT NULL, tenant_id uuid, what jsonb,
  PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
CREATE TABLE hub.event_2026_01 PARTITION OF hub.event FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
CREATE TABLE hub.event_2026_02 PARTITION OF hub.event FOR VALUES FROM ('2026-02-01') TO ('2026-03-01');
CREATE TABLE audit.log (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, thing regclass NOT NULL,
  op char(1) NOT NULL, key text, was jsonb, became jsonb);
CREATE FUNCTION audit.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO audit.log (thing, op, key, was, became) VALUES (TG_RELID, left(TG_OP, 1),
    coalesce(NEW.id, OLD.id)::text, CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END,
    CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END);
  RETURN NULL;
END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON hub.account FOR EACH ROW EXECUTE FUNCTION audit.note();
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON hub.task FOR EACH ROW EXECUTE FUNCTION audit.note();
INSERT INTO hub.tenant (name, seats, home)
  SELECT 'tenant ' || g, int4range(1, g + 1), ('Street ' || g, 'Town')::hub.address
  FROM generate_series(1, 8) g;
INSERT INTO hub.wallet (tenant_id) SELECT id FROM hub.tenant;
INSERT INTO hub.account (tenant_id, email) SELECT id, name || '@example.com' FROM hub.tenant;
INSERT INTO hub.event (at, tenant_id, what)
  SELECT '2026-01-31 12:00Z'::timestamptz + g * interval '1 hour', id, '{}' FROM hub.tenant, generate_series(1, 24) g;
"""


def invite(session: Session) -> None:
    """Restores a soft-deleted account with an UPSERT."""
    session.execute(
        "INSERT INTO hub.account (tenant_id, email, labels) VALUES (%s, %s, %s) ON CONFLICT (tenant_id, email)"
        ' DO UPDATE SET "deletedAt" = NULL, version = account.version + 1',
        session.pick("hub.tenant"), f"{session.random.randint(1, 12)}@example.com", [session.text(4), None, 'a"b'],
    )  # fmt: skip


def change_account(session: Session) -> None:
    """Optimistic locking by ``@Version``: UPDATE ... WHERE version = the version that was read."""
    account = session.pick("hub.account")
    version = session.value("SELECT version FROM hub.account WHERE id = %s", account)
    updated = session.execute(
        "UPDATE hub.account SET labels = labels || %s::text, version = %s WHERE id = %s AND version = %s",
        session.text(3), version + 1, account, version,
    )  # fmt: skip
    if updated.rowcount == 0:
        raise RolledBack


def leave(session: Session) -> None:
    account = session.pick("hub.account", where='"deletedAt" IS NULL')
    session.execute('UPDATE hub.account SET "deletedAt" = now(), version = version + 1 WHERE id = %s', account)


def create_task(session: Session) -> None:
    """Creates a task. Keys are taken from the sequence fifty at a time. Writes an outbox row in the same
    transaction."""
    tenant = session.pick("hub.tenant")
    block = session.value("SELECT nextval('hub.hibernate_sequence')")
    for number in range(session.random.randint(1, 3)):
        session.execute(
            "INSERT INTO hub.task (id, tenant_id, title, body) VALUES (%s, %s, %s, %s)",
            block + number, tenant, session.text(20), session.text(session.random.choice((5, 6000))),
        )  # fmt: skip
        session.execute(
            "INSERT INTO hub.assignee SELECT tenant_id, %s, id FROM hub.account WHERE tenant_id = %s LIMIT 2",
            block + number, tenant,
        )  # fmt: skip
    session.execute("INSERT INTO hub.outbox VALUES (%s, 'task', %s)", block, json.dumps({"id": block, "n": 1.0}))


def edit_task(session: Session) -> None:
    task = session.pick("hub.task")
    session.execute("UPDATE hub.task SET title = %s, version = version + 1 WHERE id = %s", session.text(15), task)


def delete_task(session: Session) -> None:
    session.execute("DELETE FROM hub.task WHERE id = %s", session.pick("hub.task"))


def transfer(session: Session) -> None:
    """Transfers an amount between two wallets in a SERIALIZABLE transaction."""
    session.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    payer, payee = session.pick("hub.wallet", "tenant_id"), session.pick("hub.wallet", "tenant_id")
    amount = session.random.randint(1, 1 << 40)
    for tenant, part in ((payer, -amount), (payee, amount)):
        session.execute("UPDATE hub.wallet SET balance = balance + %s WHERE tenant_id = %s", part, tenant)
        session.execute("INSERT INTO hub.entry (tenant_id, amount) VALUES (%s, %s)", tenant, part)


def call(session: Session) -> None:
    tenant = session.pick("hub.tenant")
    path = session.random.choice((None, "/x", "/y"))
    session.execute("INSERT INTO hub.raw_call VALUES (%s, now(), %s)", tenant, path)
    session.execute(
        "INSERT INTO hub.usage VALUES (%s, current_date, 1, 0.10) ON CONFLICT (day, tenant_id)"
        " DO UPDATE SET calls = usage.calls + 1, bytes = usage.bytes * 1.01", tenant,
    )  # fmt: skip


def happen(session: Session) -> None:
    """Inserts an event, and sometimes moves an event to another month's partition."""
    if session.random.random() < 0.3:
        session.execute(
            "UPDATE hub.event SET at = at + interval '20 days' WHERE id = %s AND at < '2026-02-05'",
            session.pick("hub.event"),
        )
    session.execute(
        "INSERT INTO hub.event (at, tenant_id, what) VALUES (%s, %s, %s)",
        f"2026-0{session.random.randint(1, 2)}-{session.random.randint(1, 27)}", session.pick("hub.tenant"),
        json.dumps({"e": session.text(10)}),
    )  # fmt: skip


def dispatch(session: Session) -> None:
    """Reads rows of the outbox, and deletes them."""
    session.execute(
        "DELETE FROM hub.outbox WHERE id IN (SELECT id FROM hub.outbox ORDER BY id LIMIT 3 FOR UPDATE SKIP LOCKED)"
        " RETURNING payload"
    )


def enqueue(session: Session) -> None:
    arguments = json.dumps({"text": session.text(session.random.choice((10, 4000)))})
    session.execute("INSERT INTO hub.job (arguments) VALUES (%s)", arguments)


def work(session: Session) -> None:
    """Executes a job in a savepoint. If the job fails, only the number of attempts is changed."""
    job = session.value("SELECT id FROM hub.job WHERE state = 'queued' ORDER BY run_at LIMIT 1 FOR UPDATE SKIP LOCKED")
    try:
        with session.conn.transaction():
            create_task(session)
            session.execute("UPDATE hub.job SET state = 'done' WHERE id = %s", job)
            if session.random.random() < 0.4:
                session.execute("SELECT 1 / 0")
    except errors.DivisionByZero:
        session.execute("UPDATE hub.job SET attempts = attempts + 1, run_at = now() + '1 s' WHERE id = %s", job)


def timed_out(session: Session) -> None:
    transfer(session)
    create_task(session)
    raise RolledBack


def batch(session: Session) -> None:
    """A long transaction, as of a report, which changes one row many times."""
    tenant = session.pick("hub.tenant")
    for number in range(10):
        try:
            with session.conn.transaction():
                session.execute("UPDATE hub.tenant SET name = name || %s WHERE id = %s", str(number % 10), tenant)
                session.execute("UPDATE hub.tenant SET name = right(name, 40) WHERE id = %s", tenant)
                if number % 4 == 3:
                    raise RolledBack
        except RolledBack:
            continue


def nightly(session: Session) -> None:
    session.execute("TRUNCATE hub.raw_call, hub.outbox")
    session.execute('DELETE FROM hub.account WHERE "deletedAt" IS NOT NULL')
    session.execute("DELETE FROM hub.job WHERE state = 'done'")
    session.execute("UPDATE hub.usage SET bytes = NULL WHERE calls < 3")


MIGRATIONS = (
    Migration(
        "a new month",
        (
            "CREATE TABLE hub.event_2026_03 PARTITION OF hub.event FOR VALUES FROM ('2026-03-01') TO ('2026-04-01')",
            "INSERT INTO hub.event (at, what) "
            "SELECT '2026-03-02', jsonb_build_object('n', g) FROM generate_series(1, 9) g",
        ),
    ),
    Migration(
        "an old month goes",
        (
            "ALTER TABLE hub.event DETACH PARTITION hub.event_2026_01 CONCURRENTLY",
            "DROP TABLE hub.event_2026_01",
            "CREATE TABLE hub.event_2026_01 PARTITION OF hub.event FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')",
        ),
    ),
    Migration(
        "an enum made anew, as Prisma does",
        (
            "BEGIN; CREATE TYPE hub.job_state_new AS ENUM ('queued', 'done', 'failed', 'given up');"
            " ALTER TABLE hub.job ALTER COLUMN state DROP DEFAULT;"
            " ALTER TABLE hub.job ALTER COLUMN state TYPE hub.job_state_new USING (state::text::hub.job_state_new);"
            " ALTER TYPE hub.job_state RENAME TO job_state_old; ALTER TYPE hub.job_state_new RENAME TO job_state;"
            " DROP TYPE hub.job_state_old; ALTER TABLE hub.job ALTER COLUMN state SET DEFAULT 'queued'; COMMIT",
        ),
    ),
    Migration(
        "a month restored from the archive",
        (
            "CREATE TABLE hub.archived (LIKE hub.event INCLUDING ALL)",
            "INSERT INTO hub.archived (at, what) SELECT '2025-12-05', '{\"old\": true}' FROM generate_series(1, 7)",
            "ALTER TABLE hub.event ATTACH PARTITION hub.archived FOR VALUES FROM ('2025-12-01') TO ('2026-01-01')",
            "UPDATE hub.event SET what = '[1]' WHERE at < '2026-01-01'",
        ),
    ),
    Migration(
        "usage by region, swapped in",
        (
            "CREATE TABLE hub.usage_new (LIKE hub.usage INCLUDING DEFAULTS, region text NOT NULL DEFAULT 'eu')",
            "ALTER TABLE hub.usage_new ADD PRIMARY KEY (day, tenant_id)",
            "BEGIN; LOCK TABLE hub.usage IN ACCESS EXCLUSIVE MODE; INSERT INTO hub.usage_new SELECT * FROM hub.usage;"
            " ALTER TABLE hub.usage RENAME TO usage_old; ALTER TABLE hub.usage_new RENAME TO usage; COMMIT",
        ),
        setup=True,
    ),
    Migration(
        "the log moves",
        (
            "CREATE SCHEMA archive",
            "ALTER TABLE audit.log SET SCHEMA archive",
            "ALTER TABLE archive.log SET SCHEMA audit",
        ),
    ),
    Migration(
        "an address has a zip",
        (
            "ALTER TYPE hub.address ADD ATTRIBUTE zip text",
            "UPDATE hub.tenant SET home = ('New', 'Town', '1') WHERE id IN (SELECT id FROM hub.tenant LIMIT 1)",
        ),
    ),
    Migration(
        "a month with days",
        (
            "CREATE TABLE hub.event_2026_04 PARTITION OF hub.event FOR VALUES FROM ('2026-04-01') TO ('2026-05-01')"
            " PARTITION BY RANGE (at)",
            "CREATE TABLE hub.event_2026_04_a PARTITION OF hub.event_2026_04"
            " FOR VALUES FROM ('2026-04-01') TO ('2026-04-15')",
            "INSERT INTO hub.event (at) SELECT '2026-04-02' FROM generate_series(1, 5)",
        ),
    ),
    Migration(
        "a month is maintained",
        (
            "ALTER TABLE hub.event DETACH PARTITION hub.event_2026_02",
            "ALTER TABLE hub.event ATTACH PARTITION hub.event_2026_02 FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')",
        ),
    ),
)

HUB = Application(
    "hub", MODEL,
    requests={
        invite: 4, change_account: 5, leave: 2, create_task: 5, edit_task: 4, delete_task: 2, transfer: 6, call: 6,
        happen: 5, dispatch: 3, enqueue: 4, work: 4, timed_out: 2, batch: 1, nightly: 1,
    },
    rejected=timed_out, nightly=nightly, migrations=MIGRATIONS,
    invariants=(
        Invariant("wallets are the sum of their entries", {"wallet": "hub.wallet", "entry": "hub.entry"},
                  "SELECT w.tenant_id FROM wallet w LEFT JOIN entry e ON e.tenant_id = w.tenant_id"
                  " GROUP BY w.tenant_id, w.balance HAVING w.balance <> coalesce(sum(e.amount), 0)"),
        Invariant("the log counts an account's versions", {"account": "hub.account", "log": "audit.log"},
                  "SELECT a.id FROM account a LEFT JOIN log l ON l.key = a.id AND l.op = 'U'"
                  " GROUP BY a.id, a.version HAVING a.version <> count(l.id)"),
        Invariant("assignees have a task", {"task": "hub.task", "assignee": "hub.assignee"},
                  "SELECT a.task_id FROM assignee a LEFT JOIN task t ON t.id = a.task_id WHERE t.id IS NULL"),
    ),
)  # fmt: skip
