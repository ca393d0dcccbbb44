"""Pure rules and facts: no I/O, no library but numpy and pyarrow.

lsn, ranges         positions in the WAL; half-open ranges of positions
names, catalog      names of tables; facts from the source's catalog
marks               catalog row versions, compared to notice changes that no LSN shows
endpos, retention   where a run must stop; what may be deleted
prefixes            which logical messages a setting asks for
states, reported    the states of a table; the positions of a status update, which never go down
location, layout    the place of a file or folder; the places of everything in the lake
formats, encoding   the format number of stored files; the encodings of the source's texts
master              whether a Spark master URL puts executors on this machine
arrays              names for numpy arrays, and the array functions that several packages share
ending, faultpoints how a process ends on a signal; where the crash tests stop a process
"""
