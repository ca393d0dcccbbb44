"""A forum as in Rails: bigserial keys, timestamps(6), polymorphic rows, counter caches, jsonb, enums as integers, join
tables without a key, versions of migrations in a table with a text key."""

from __future__ import annotations

import json

from psycopg import errors

from tests.workloads.application import Application, Invariant, Migration, RolledBack, Session

MODEL = """
CREATE TABLE schema_migrations (version character varying NOT NULL PRIMARY KEY);
CREATE TABLE ar_internal_metadata (
  key character varying NOT NULL PRIMARY KEY, value character varying,
  created_at timestamp(6) without time zone NOT NULL, updated_at timestamp(6) without time zone NOT NULL);
CREATE TABLE users (
  id bigserial PRIMARY KEY, email character varying NOT NULL, login character varying, role integer DEFAULT 0 NOT NULL,
  preferences jsonb DEFAULT '{}' NOT NULL, posts_count integer DEFAULT 0 NOT NULL, lock_version integer DEFAULT 0,
  last_ip inet, created_at timestamp(6) NOT NULL, updated_at timestamp(6) NOT NULL);
CREATE UNIQUE INDEX index_users_on_email ON users (lower(email));
CREATE TABLE topics (
  id bigserial PRIMARY KEY, user_id bigint REFERENCES users ON DELETE SET NULL, title character varying NOT NULL,
  state integer DEFAULT 0 NOT NULL, posts_count integer DEFAULT 0 NOT NULL, views integer DEFAULT 0,
  bumped_at timestamp(6), created_at timestamp(6) NOT NULL, updated_at timestamp(6) NOT NULL);
CREATE TABLE posts (
  id bigserial PRIMARY KEY, topic_id bigint NOT NULL REFERENCES topics ON DELETE CASCADE,
  user_id bigint NOT NULL REFERENCES users, body text NOT NULL, score decimal(8,3),
  created_at timestamp(6) NOT NULL, updated_at timestamp(6) NOT NULL);
CREATE INDEX index_posts_on_topic_id ON posts (topic_id);
CREATE TABLE reactions (
  id bigserial PRIMARY KEY, user_id bigint NOT NULL REFERENCES users, reactable_type character varying NOT NULL,
  reactable_id bigint NOT NULL, kind integer NOT NULL, created_at timestamp(6) NOT NULL, updated_at timestamp(6));
CREATE UNIQUE INDEX index_reactions ON reactions (user_id, reactable_type, reactable_id);
CREATE TABLE tags (id bigserial PRIMARY KEY, name character varying NOT NULL UNIQUE);
CREATE TABLE tags_topics (tag_id bigint NOT NULL, topic_id bigint NOT NULL);
CREATE TABLE memberships (
  user_id bigint NOT NULL REFERENCES users ON DELETE CASCADE, tag_id bigint NOT NULL REFERENCES tags,
  level smallint DEFAULT 1, PRIMARY KEY (user_id, tag_id));
CREATE TABLE notifications (
  id bigserial PRIMARY KEY, recipient_id bigint NOT NULL, kind character varying, params jsonb, read_at timestamp(6),
  created_at timestamp(6) NOT NULL, updated_at timestamp(6) NOT NULL);
CREATE TABLE page_views (id bigserial PRIMARY KEY, path character varying, visit_id uuid, at timestamp(6) NOT NULL);
CREATE TABLE daily_views (day date, path character varying, views bigint DEFAULT 0 NOT NULL, PRIMARY KEY (day, path));
INSERT INTO schema_migrations VALUES ('20260101000000');
INSERT INTO ar_internal_metadata VALUES ('environment', 'production', now(), now());
INSERT INTO users (email, login, created_at, updated_at)
  SELECT 'user' || g || '@example.com', 'user' || g, now(), now() FROM generate_series(1, 30) g;
INSERT INTO tags (name) SELECT 'tag ' || g FROM generate_series(1, 8) g;
INSERT INTO topics (user_id, title, created_at, updated_at)
  SELECT g, 'Topic ' || g, now(), now() FROM generate_series(1, 20) g;
INSERT INTO tags_topics SELECT g % 8 + 1, g FROM generate_series(1, 20) g;
"""


def sign_up(session: Session) -> None:
    """create_or_find_by: inserts in a savepoint, and uses the existing row if the insert violates the unique index."""
    email = f"user{session.random.randint(1, 60)}@example.com"
    try:
        with session.conn.transaction():
            session.execute(
                "INSERT INTO users (email, login, preferences, last_ip, created_at, updated_at)"
                " VALUES (%s, %s, %s, '::1', now(), now())", email, session.text(8), json.dumps({"mail": 1}),
            )  # fmt: skip
    except errors.UniqueViolation:
        session.execute("UPDATE users SET updated_at = clock_timestamp() WHERE lower(email) = lower(%s)", email)


def open_topic(session: Session) -> None:
    user = session.pick("users")
    topic = session.value(
        "INSERT INTO topics (user_id, title, bumped_at, created_at, updated_at)"
        " VALUES (%s, %s, now(), now(), now()) RETURNING id", user, session.text(30),
    )  # fmt: skip
    _post(session, topic, user, session.random.choice((40, 400, 9000)))
    for tag in {session.pick("tags"), session.pick("tags")}:
        session.execute("INSERT INTO tags_topics (tag_id, topic_id) VALUES (%s, %s)", tag, topic)


def reply(session: Session) -> None:
    topic, user = session.pick("topics"), session.pick("users")
    _post(session, topic, user, session.random.choice((10, 100, 3000)))
    session.execute(
        "INSERT INTO notifications (recipient_id, kind, params, created_at, updated_at)"
        " SELECT DISTINCT user_id, 'reply', jsonb_build_object('topic', topic_id), now(), now()"
        " FROM posts WHERE topic_id = %s AND user_id <> %s", topic, user,
    )  # fmt: skip


def _post(session: Session, topic: int, user: int, length: int) -> None:
    session.execute(
        "INSERT INTO posts (topic_id, user_id, body, score, created_at, updated_at)"
        " VALUES (%s, %s, %s, %s, now(), now())", topic, user, session.text(length), session.random.random() * 100,
    )  # fmt: skip
    session.execute("UPDATE topics SET posts_count = COALESCE(posts_count, 0) + 1 WHERE id = %s", topic)
    session.execute("UPDATE users SET posts_count = COALESCE(posts_count, 0) + 1 WHERE id = %s", user)


def edit_post(session: Session) -> None:
    """In half of the cases, the long body does not change, so PostgreSQL does not send it again."""
    post = session.pick("posts")
    if session.random.random() < 0.5:
        session.execute("UPDATE posts SET score = score + 1, updated_at = clock_timestamp() WHERE id = %s", post)
    else:
        body = session.text(session.random.choice((5, 5000)))
        session.execute("UPDATE posts SET body = %s, updated_at = clock_timestamp() WHERE id = %s", body, post)


def delete_post(session: Session) -> None:
    """Deletes a post with ``dependent: :delete_all``, and updates the counter caches."""
    post = session.pick("posts")
    topic, user = session.row("SELECT topic_id, user_id FROM posts WHERE id = %s FOR UPDATE", post)
    session.execute("DELETE FROM reactions WHERE reactable_type = 'Post' AND reactable_id = %s", post)
    session.execute("DELETE FROM posts WHERE id = %s", post)
    session.execute("UPDATE topics SET posts_count = posts_count - 1 WHERE id = %s", topic)
    session.execute("UPDATE users SET posts_count = posts_count - 1 WHERE id = %s", user)


def delete_topic(session: Session) -> None:
    """Deletes a topic. The foreign key's cascade deletes its posts."""
    topic = session.pick("topics")
    session.execute("SELECT 1 FROM topics WHERE id = %s FOR UPDATE", topic)
    session.execute(
        "UPDATE users SET posts_count = posts_count - gone.n FROM"
        " (SELECT user_id, count(*) AS n FROM posts WHERE topic_id = %s GROUP BY 1) gone WHERE id = gone.user_id",
        topic,
    )  # fmt: skip
    session.execute("DELETE FROM tags_topics WHERE topic_id = %s", topic)
    session.execute("DELETE FROM topics WHERE id = %s", topic)


def react(session: Session) -> None:
    """Adds a reaction with upsert_all."""
    user, kind, post = session.pick("users"), session.random.randint(0, 5), session.pick("posts")
    session.execute(
        "INSERT INTO reactions (user_id, reactable_type, reactable_id, kind, created_at)"
        " VALUES (%s, 'Post', %s, %s, now())"
        " ON CONFLICT (user_id, reactable_type, reactable_id) DO UPDATE SET kind = excluded.kind, updated_at = now()",
        user, post, kind,
    )  # fmt: skip


def mark_read(session: Session) -> None:
    user = session.pick("notifications", "recipient_id")
    session.execute("UPDATE notifications SET read_at = now() WHERE recipient_id = %s AND read_at IS NULL", user)


def change_preferences(session: Session) -> None:
    """Optimistic locking: fails with a stale object if another request updated the row."""
    user = session.pick("users")
    version = session.value("SELECT lock_version FROM users WHERE id = %s", user)
    updated = session.execute(
        "UPDATE users SET preferences = preferences || %s, role = (role + 1) %% 3, lock_version = %s"
        " WHERE id = %s AND lock_version = %s", json.dumps({session.text(6): [1.50, None]}), version + 1, user, version,
    )  # fmt: skip
    if updated.rowcount == 0:
        raise RolledBack


def join_and_leave(session: Session) -> None:
    user, tag = session.pick("users"), session.pick("tags")
    if session.execute("DELETE FROM memberships WHERE user_id = %s AND tag_id = %s", user, tag).rowcount == 0:
        session.execute("INSERT INTO memberships (user_id, tag_id) VALUES (%s, %s)", user, tag)


def view(session: Session) -> None:
    path = f"/t/{session.random.randint(1, 9)}"
    session.execute("INSERT INTO page_views (path, visit_id, at) VALUES (%s, gen_random_uuid(), now())", path)
    session.execute(
        "INSERT INTO daily_views VALUES (current_date, %s, 1) ON CONFLICT (day, path)"
        " DO UPDATE SET views = daily_views.views + 1", path,
    )  # fmt: skip


def rejected(session: Session) -> None:
    """A request that fails in an after_save callback, after everything has been written."""
    open_topic(session)
    raise RolledBack


def imported(session: Session) -> None:
    """A long transaction with many savepoints, some of which are rolled back."""
    for number in range(12):
        try:
            with session.conn.transaction():
                _post(session, session.pick("topics"), session.pick("users"), 200)
                if number % 3 == 0:
                    raise RolledBack
        except RolledBack:
            continue


def nightly(session: Session) -> None:
    session.execute("TRUNCATE TABLE page_views RESTART IDENTITY")
    session.execute("DELETE FROM notifications WHERE read_at IS NOT NULL")
    session.execute("UPDATE topics SET views = views + 1")
    session.execute("DELETE FROM daily_views WHERE views < 2")


def _versioned(version: int, *statements: str) -> str:
    """The SQL of a migration: one transaction, which also records the version of the migration."""
    return "; ".join([*statements, f"INSERT INTO schema_migrations (version) VALUES ('{version}')"])


MIGRATIONS = (
    Migration(
        "CreateBadges",
        (
            _versioned(
                20260205000000,
                "CREATE TABLE badges (id bigserial PRIMARY KEY, name character varying NOT NULL,"
                " user_id bigint REFERENCES users ON DELETE CASCADE, created_at timestamp(6) NOT NULL)",
            ),
            "INSERT INTO badges (name, user_id, created_at) SELECT 'pioneer', id, now() FROM users",
        ),
        setup=True,
    ),
    Migration(
        "KindToBigint, without downtime",
        (
            "ALTER TABLE reactions ADD kind_new bigint",
            "CREATE FUNCTION copy_kind() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN NEW.kind_new := NEW.kind; RETURN NEW; END $$",
            "CREATE TRIGGER copy_kind BEFORE INSERT OR UPDATE ON reactions FOR EACH ROW EXECUTE FUNCTION copy_kind()",
            "UPDATE reactions SET kind_new = kind WHERE id % 2 = 0",
            "UPDATE reactions SET kind_new = kind WHERE id % 2 = 1",
            _versioned(
                20260208000000,
                "DROP TRIGGER copy_kind ON reactions",
                "ALTER TABLE reactions RENAME COLUMN kind TO kind_old",
                "ALTER TABLE reactions RENAME COLUMN kind_new TO kind",
                "ALTER TABLE reactions ALTER COLUMN kind_old DROP NOT NULL",
            ),
            "ALTER TABLE reactions DROP COLUMN kind_old",
            "DROP FUNCTION copy_kind()",
        ),
    ),
    Migration(
        "SwapPageViews",
        (
            "CREATE TABLE page_views_new (LIKE page_views INCLUDING ALL)",
            # The lock is taken first, because the nightly TRUNCATE restarts the sequence, which must not happen before
            # the swap.
            _versioned(
                20260209000000,
                "LOCK TABLE page_views",
                "INSERT INTO page_views_new SELECT * FROM page_views",
                "ALTER TABLE page_views RENAME TO page_views_old",
                "ALTER TABLE page_views_new RENAME TO page_views",
                "ALTER SEQUENCE page_views_id_seq OWNED BY page_views.id",
            ),
            "INSERT INTO page_views (path, at) VALUES ('/swapped', now())",
            "DROP TABLE page_views_old",
        ),
        setup=True,
    ),
    Migration(
        "AddKeyToTagsTopics",
        (
            _versioned(20260210000000, "ALTER TABLE tags_topics ADD id bigserial PRIMARY KEY"),
            "DELETE FROM tags_topics WHERE id % 4 = 0",
        ),
        setup=True,
    ),
    Migration(
        "RenameNotifications",
        (
            _versioned(
                20260212000000,
                "ALTER TABLE notifications RENAME TO alerts",
                "ALTER SEQUENCE notifications_id_seq RENAME TO alerts_id_seq",
                "CREATE VIEW notifications AS SELECT * FROM alerts",
            ),
            "UPDATE alerts SET kind = 'alert' WHERE id % 3 = 0",
        ),
    ),
    Migration("DropBadges", (_versioned(20260213000000, "DROP TABLE badges"),)),
)

FORUM = Application(
    "forum", MODEL,
    requests={
        sign_up: 3, open_topic: 3, reply: 8, edit_post: 5, delete_post: 3, delete_topic: 1, react: 5, mark_read: 2,
        change_preferences: 4, join_and_leave: 4, view: 5, rejected: 2, imported: 1, nightly: 1,
    },
    rejected=rejected, nightly=nightly, migrations=MIGRATIONS,
    invariants=(
        Invariant("topics count their posts", {"topics": "public.topics", "posts": "public.posts"},
                  "SELECT t.id FROM topics t LEFT JOIN posts p ON p.topic_id = t.id"
                  " GROUP BY t.id, t.posts_count HAVING t.posts_count <> count(p.id)"),
        Invariant("users count their posts", {"users": "public.users", "posts": "public.posts"},
                  "SELECT u.id FROM users u LEFT JOIN posts p ON p.user_id = u.id"
                  " GROUP BY u.id, u.posts_count HAVING u.posts_count <> count(p.id)"),
        Invariant("posts have a topic", {"topics": "public.topics", "posts": "public.posts"},
                  "SELECT p.id FROM posts p LEFT JOIN topics t ON p.topic_id = t.id WHERE t.id IS NULL"),
    ),
)  # fmt: skip
