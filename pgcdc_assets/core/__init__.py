"""Pure rules and facts: no I/O, no library but numpy and pyarrow.

lsn                 positions in the WAL; half-open ranges of positions
names, catalog      names of tables; facts from the source's catalog
marks               catalog row versions, compared to notice changes that no LSN shows
positions           where a run must stop, and the positions that it reports
retention, states   what may be deleted; the states of a table
settingvalues       the syntax of settings: prefixes of messages, masters of Spark
layout              the place of a file or folder; the places of everything in the lake
formats, encoding   the format number of stored files; the encodings of the source's texts
arrays              names for numpy arrays, and the array functions that several packages share
ending, faultpoints how a process ends on a signal; where the crash tests stop a process
"""
