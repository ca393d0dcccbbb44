"""Delta Lake tables kept exactly equal to a PostgreSQL database, by logical replication."""
