"""Reads and writes the files of the lake. No other package uses a file system or an object store for the lake.

storage -> base <- local, objects
   |
scratch

storage     the functions that other packages call; each function calls the store in which the file is
base        the interface of a store, and what each store must guarantee
local       the store for a lake in a folder of this machine
objects     the store for a lake in an object store: S3, Azure, Google Cloud
scratch     drafts: files on this machine's disk that are not finished, or not yet in their store
lease       leases, which only one process holds at a time (on a file system, a locked file); names of processes
chainlease  leases in an object store: a chain of numbered files
localfiles  files that survive a power cut, and folders that only their owner may enter
"""
