"""Mirrors as Delta tables.

snapshot -> copy -> copytask -> copyblock                one commit brings rows and position
feed -> apply -> tablework -> units -> task -> match     one commit brings changes and position

deltatarget implements the contract of mirror.target with the modules below
mirror      creates mirrors, reads positions    mirrorschema  columns; tables that cannot have a mirror
copy        COPY in parallel tasks              copytask    what one Spark task does
copyblock   a block of CSV as the mirror's columns
apply       the feeds of a turn into mirrors    tablework   one table's part of it
units       how the work is divided             task        what one Spark task does
match       changes against the mirror's rows   keyindex    which rows have one of some keys
reshape     changes the structure               projection  what one Spark task does for that
leaving     deletes rows of removed partitions  rename      the same rows under another name
commented   comments of a table and its columns
rowgroups   a mirror's files as a merge reads them         liverows   all rows, for tables that delta-rs cannot query
repair      derives a range again               settlement  makes versions durable
othercommits  row changes by other writers      compaction  rewrites small and worn files
thinning    deletes versions nobody needs       upkeep      OPTIMIZE, and what readers are promised
lakeremoval  deletes the lake, but no files of other owners
"""
