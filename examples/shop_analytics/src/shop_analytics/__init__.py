"""Two PostgreSQL databases, their mirrors, and reports built on them."""
