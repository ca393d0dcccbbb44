"""The codes of the problems that ``status`` reports. Programs may depend on a code, but not on the words of a problem.
``docs/json.md`` lists all codes."""

from __future__ import annotations

from enum import StrEnum


class ProblemCode(StrEnum):
    """The kind of a problem."""

    # The project and its lake
    NOT_SET_UP = "not_set_up"
    WRONG_SETTINGS = "wrong_settings"
    WRONG_SOURCE = "wrong_source"
    WRONG_LAKE = "wrong_lake"
    CATALOG_UNREADABLE = "catalog_unreadable"
    LAKE_UNREADABLE = "lake_unreadable"
    LAKE_UNREACHABLE = "lake_unreachable"
    LAKE_LOCKED = "lake_locked"
    OPERATION_FAILED = "operation_failed"
    RANGE_KEY_ODD = "range_key_odd"
    REGISTRY_BEHIND = "registry_behind"
    # The source
    SOURCE_UNREACHABLE = "source_unreachable"
    SOURCE_WAL_LEVEL = "source_wal_level"
    SOURCE_WAITS_FOR_US = "source_waits_for_us"
    # The slot
    SLOT_MISSING = "slot_missing"
    SLOT_LOST = "slot_lost"
    SLOT_NEARLY_LOST = "slot_nearly_lost"
    SLOT_LITTLE_WAL_LEFT = "slot_little_wal_left"
    SLOT_OF_ANOTHER = "slot_of_another"
    SLOT_TWO_PHASE = "slot_two_phase"
    SLOT_ON_STANDBY = "slot_on_standby"
    SLOT_HELD = "slot_held"
    SLOT_UNREAD = "slot_unread"
    SLOT_IDLE_TIMEOUT = "slot_idle_timeout"
    SLOT_HOLDS_WAL = "slot_holds_wal"
    SLOT_HELD_BACK = "slot_held_back"
    SLOT_HOLDS_CATALOG = "slot_holds_catalog"
    # The change log
    LOG_GAP = "log_gap"
    LOG_OF_ANOTHER_SOURCE = "log_of_another_source"
    LOG_AHEAD_OF_SOURCE = "log_ahead_of_source"
    # Publications
    PUBLICATION_MISSING = "publication_missing"
    PUBLICATION_EMPTY = "publication_empty"
    PUBLICATION_LACKS_CHANGES = "publication_lacks_changes"
    PUBLICATION_LACKS_TRUNCATE = "publication_lacks_truncate"
    # Tables and mirrors
    TABLE_SET_ASIDE = "table_set_aside"
    TABLE_WAITS = "table_waits"
    TABLE_LAGS = "table_lags"
    TABLE_LOST_CHANGES = "table_lost_changes"
    TABLE_UNPUBLISHED = "table_unpublished"
    TABLE_NOT_PUBLISHED_YET = "table_not_published_yet"
    TABLE_RENAMED = "table_renamed"
    TABLE_NAME_NOT_TEXT = "table_name_not_text"
    TABLE_WITHOUT_IDENTITY = "table_without_identity"
    TABLE_INSERTS_ONLY = "table_inserts_only"
    PARTITION_OUTSIDE = "partition_outside"
    ROWS_IN_NO_MIRROR = "rows_in_no_mirror"
    MIRROR_CHANGED_BY_OTHERS = "mirror_changed_by_others"
    MIRROR_NOT_FOLLOWED = "mirror_not_followed"
    MIRROR_WAITS_FOR_NAME = "mirror_waits_for_name"
    # The feed of messages
    MESSAGES_UNREADABLE = "messages_unreadable"
    MESSAGES_BEHIND = "messages_behind"
