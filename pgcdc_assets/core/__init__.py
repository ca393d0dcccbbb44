"""Pure rules and facts: no I/O, no library but numpy and pyarrow.

lsn, ranges         positions in the WAL; half-open spans of it
names, catalog      names of tables; what the source's catalog says, as plain facts
marks               what tables are compared by to notice changes that no LSN shows
endpos, retention   where a run must stop; what may be forgotten
prefixes            which logical messages a setting asks for
states, reported    the life of a table; the positions of a status update, which never fall
location, layout    places as values; where everything lies in the lake
formats, encoding   what stored files have in common; the encodings of the source's texts
master              what a Spark master says of where the executors are
arrays              names for numpy arrays, and the array functions that several packages share
ending, faultpoints how a process ends by a signal; where the crash tests stop one
"""
