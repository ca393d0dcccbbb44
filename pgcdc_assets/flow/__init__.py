"""Runs the stages together, under one lock: copy, receive, transform, apply, publish.

A **turn** writes the changes up to one boundary (a WAL position outside of commit records) to the feeds, and applies
them to the mirrors. A **point** is a row of ``consistent_points``: an LSN, and the version of each mirror at this LSN.
A **range** is one or more whole batches of the log. It is a Dagster partition, and the unit of backfills.

engine -> sync --> turns (transform, apply, publish)      one writer per lake
             +---> catalogwatch -> structurechanges (in a thread of their own)
             +---> copies (in a thread of their own)

engine      all operations                      work        the objects that every operation uses
decide      decides what a run does next: pure functions
sync        carries out one run of the sync     stream      the run's view of its receiver and its source
turns       applies the log to tables, turn by turn, and publishes the points of a run
ranges      counts, closes and reports the ranges of a run
messages    the feed of logical messages in a run
registration  registers mirrors in a catalog of query engines after points
copies      makes the snapshot copies of a run
catalogwatch      checks the source's catalog; copies comments to the mirrors
structurechanges  changes structures and names of mirrors after a catalog check
progress    state and position of all tables    standing    reads them from the lake; which tables a point may list
backfill    derives, applies and repairs ranges by hand
maintenance deletes data that is no longer needed
outcomes    records how the last operations ended
meter       counts what runs do, for metrics; sends OpenTelemetry spans of each turn
requests    what the operator and verify ask of a running sync
boundary    makes a point at the LSN of a snapshot, for verify
ownlake     refuses a lake that is not the project's own
lock        one writer per lake                 reports     the results of a run, and its observers
"""
