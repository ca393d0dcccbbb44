"""Connects to the source with fixed session settings, typed errors and a limit on silence. Messages contain no secrets.

connection    connects for SQL, by psycopg; quotes names and values
walsender     the replication connection, by libpq
readers       read frames from a connection, by libpq or thousands at a time from its socket
failures      maps SQLSTATE to a class of error and an advice
pluginoptions chooses the options of pgoutput, by the server's version
route         how another machine reaches the source
silence       limits how long the source may send nothing
"""
