"""Mirrors as Delta tables.

snapshot -> copy -> copytask                          one Delta commit adds rows and position
feed -> apply -> tableplan -> applytask -> rowlookup  one Delta commit adds changes and position

deltatarget implements the contract of mirror.target with the modules below
mirror      opens and creates mirrors, reads positions   mirrorschema  columns, comments; tables without a mirror
copy        snapshot copies, by COPY in parallel tasks   copytask      what one Spark task of a copy does
apply       applies the feeds of a turn; repairs         tableplan     one table's part of an apply
applytask   divides an apply into units, and what one Spark task does with them
rowlookup   finds the rows of changed keys               keyindex      which rows have a wanted key
rowgroups   reads a mirror's files
reshape     changes the structure, and what one Spark task of such a change does
durability  makes versions durable; finds row changes by other writers
compaction  rewrites small files, and files with many deleted rows
removal     keeps the versions that points name readable, deletes what only other versions need; deletes the lake
"""
