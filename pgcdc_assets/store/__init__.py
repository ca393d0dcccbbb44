"""Reads and writes the files of the lake. No other package uses a file system or an object store for the lake.

storage -> base <- local, objects
   |
scratch

storage     the functions that other packages call: each call goes to the store that holds the place
base        the contract of a store
local       a store in a folder of this machine
objects     a store in an object store: S3, Azure, Google Cloud
scratch     folders on this machine's disk, for files that are not finished
lease       a place that only one process holds at a time, as long as it lives; a locked file
chainlease  a lease in an object store: a chain of numbered files
processname a name of a process that is unique on all hosts
localfiles  files that survive a power cut, and folders that only their owner may enter
"""
