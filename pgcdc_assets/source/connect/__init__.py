"""Connections: the same session settings everywhere, typed errors, a bound on silence, no secrets in messages.

connection    SQL by psycopg
libpq         a connection at libpq's level  walsender     the replication connection
readers       frames off a connection        socketreader  the same, thousands of frames at a time
quoting       names and values in commands   failures      SQLSTATE -> class of error and advice
pluginoptions what pgoutput is asked for, by version
route         how another machine reaches the source
silence       how long the source may say nothing
"""
