"""The stages put together, under one lock: copy, receive, transform, apply, publish.

engine -> sync --> turn (transform, apply, publish)      one writer per lake
             +---> copies -> copying (beside the turns)

engine      every operation                     work        the parts that an operation works with
decide      decides what a run does next: pure
sync        the run that carries it out         stream      its view of the receiver
turns       what a run takes next, and its points
turn        takes tables to one boundary        ranges      when a range is cut
messages    the feed of logical messages within a run
closing     closes the ranges of a run          copies      its snapshot copies, round after round
copying     one round of them, in its thread
progress    where all tables stand              standing    what the lake says of one
listedtables  what of them a point lists        accounting  counts rows that no mirror takes
catalogwatch  looks at the catalog              backfill    derives, applies and repairs ranges by hand
maintenance deletes what nobody needs           thinning    deletes old points while a run goes on
structurechanges  carries out what a verdict says of a table
commenting  carries comments of tables and columns
newtables   publishes the tables and partitions that came
renaming    lets mirrors go on under the new names of their tables
reshaping   changes of mirrors for both, in a thread of their own
forgetting  deletes mirrors of tables that are gone
recovering  repairs what a power cut left       outcomes    how the last operations ended
sentinel    what an operator tells the runs     outage      pauses while the source is away
boundary    brings the mirrors to the LSN of a snapshot, for verify
ownlake     refuses another lake than the project's
lock, hold                                                  work with other processes
observer, reports                                           what a run reports
"""
