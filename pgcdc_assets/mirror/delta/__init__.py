"""Mirrors as Delta tables.

snapshot -> copy -> copytask -> copyblock                one commit brings rows and position
feed -> apply -> tablework -> units -> task -> match     one commit brings changes and position

deltatarget all of it as the flow asks for it: mirror.target
mirror      how it is made, where it stands     mirrorschema  its columns, and who has no mirror
copy        COPY in parallel tasks              copytask    what one Spark task does
copyblock   a block of CSV as the mirror's columns
apply       the feeds of a turn into mirrors    tablework   one table's part of it
units       how the work divides                task        what one Spark task does
match       changes against the mirror's rows   keyindex    which rows have one of some keys
reshape     another structure by its own rows   projection  what one Spark task does for that
leaving     rows of partitions that went        rename      the same rows under another name
commented   comments of its table and columns
rowgroups   a mirror's files as a merge reads them         liverows   all rows, where delta-rs reads none
repair      a range derived again               settlement  which versions are durable
othercommits  changes of rows by others         compaction  small and worn files written anew
thinning    versions that nobody needs go       upkeep      OPTIMIZE, and what readers are promised
lakeremoval  mirrors and all else of ours go, files of others stay
"""
