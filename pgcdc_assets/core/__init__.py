"""Pure rules and facts: no I/O, no library but numpy and pyarrow.

lsn                 positions in the WAL; half-open ranges of positions; where the receiver stops, and what it reports
names, catalog      names of tables; facts from the source's catalog
marks               versions of catalog rows; a new version shows a change that the stream does not send
retention           what may be deleted
settingvalues       the syntax of settings: prefixes of messages, masters of Spark
layout              the location of a file or folder; the locations of all files in the lake
formats, encoding   the format number of stored data; the encodings of the source's texts
arrays              names for numpy arrays, and the array functions that several packages share
ending, faultpoints how a process ends on a signal; where the crash tests stop a process
"""
