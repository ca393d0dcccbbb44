"""Mirrors as Delta tables.

snapshot -> copy -> copytask                          one Delta commit adds rows and position
feed -> apply -> tableplan -> applytask -> rowlookup  one Delta commit adds changes and position

deltatarget implements the contract of mirror.target with the modules below
mirror      opens and creates mirrors, reads positions   mirrorschema  columns, comments; tables without a mirror
copy        COPY in parallel tasks                       copytask      what one Spark task does
apply       the feeds of a turn into mirrors; repairs    tableplan     one table's part of an apply
applytask   units of work, and what one Spark task does
rowlookup   finds the rows of changed keys               keyindex      which rows have a wanted key
rowgroups   reads a mirror's files
reshape     changes the structure or the name            projection    the Spark task of a reshape
durability  makes versions durable; finds row changes by other writers
compaction  rewrites small and worn files
versionexpiry  protects promised versions, deletes what only other versions need
lakeremoval  deletes the lake, but no files of other owners
"""
