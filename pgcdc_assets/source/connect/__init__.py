"""Connects to the source, always with the same session settings, typed errors and a limit on silence.

Messages contain no secrets.

connection    a connection for SQL, by psycopg
libpq         a connection for direct calls of libpq, and the quoting of names and values in its commands
walsender     the replication connection
readers       read frames from a connection, by libpq or thousands at a time from its socket
failures      maps SQLSTATE to a class of error and an advice
pluginoptions the options of pgoutput, by the server's version
route         how another machine reaches the source
silence       how long the source may send nothing
"""
