"""Runs the stages together, under one lock: copy, receive, transform, apply, publish.

engine -> sync --> turn (transform, apply, publish)      one writer per lake
             +---> copies -> copying (in its own thread)

engine      all operations                      work        the parts that an operation works with
decide      decides what a run does next: pure functions
sync        one run, which carries this out     stream      the run's view of the receiver
turns       the turns of a run, and its points
turn        one turn: brings tables to one boundary
ranges      when a range is closed              closing     closes the ranges of a run
messages    the feed of logical messages in a run
copies      the snapshot copies of a run, round after round
copying     one round of copies, in its own thread
progress    state and position of all tables    standing    reads state and position of one table
listedtables  the tables that a point lists     accounting  counts rows that no mirror takes
catalogwatch  checks the source's catalog       backfill    derives, applies and repairs ranges by hand
maintenance deletes what nobody needs           thinning    deletes old points during a run
structurechanges  changes the structure of mirrors, as the catalog check decided
commenting  carries comments of tables and columns to the mirrors
newtables   publishes new tables and partitions
renaming    renames the mirrors of renamed tables
reshaping   the thread that changes structures and names of mirrors
forgetting  deletes the mirrors of tables that are no longer followed
outcomes    records how the last operations ended
sentinel    the operator's requests to runs     outage      pauses while the source is unreachable
boundary    brings the mirrors to the LSN of a snapshot, for verify
ownlake     refuses a lake that is not the project's own
lock, hold  coordination with other processes   observer, reports   what a run reports
"""
