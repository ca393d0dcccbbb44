"""The bytes of the lake: the only package that touches the file system, or an object store, on the lake's behalf.

storage -> base <- local, memory, objects -> rangefile
   |
scratch

storage     what other packages call: each call goes to the store that holds the place
base        the contract of a store
local       a folder on this machine
objects     an object store: S3, Azure, Google Cloud
rangefile   a remote file for Parquet's readers
memory      a store for tests, in this process alone
scratch     this machine's own disk, for files under way
lease       a place that one process holds, and the sign that it lives
filelease   on a file system: a locked file
chainlease  in an object store: a chain of numbered files
processname a process by a name that no other has, on any host
durable     what survives a power cut on a file system
private     folders that their owner alone may enter
"""
