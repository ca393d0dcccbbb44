"""Connects to the source. Each connection has fixed session settings and raises the errors of ``errors.py``. It is
treated as lost if the server sends nothing for a minute and does no work for us. Errors and log lines contain no
secrets.

connection    connects for SQL, by psycopg; quotes names and values
walsender     the replication connection, by libpq
readers       read frames from a connection: by libpq, or thousands at a time directly from its socket
failures      maps each SQLSTATE to a class of error and to advice
pluginoptions chooses the options of pgoutput, by the server's version
route         how another machine reaches the source
silence       limits how long the source may send nothing
"""
