"""The stages put together, under one lock: copy, receive, transform, apply, publish.

engine -> sync --> turn (transform, apply, publish)      one writer per lake
             |---> copies -> copying (beside the turns)
             +---> serving (what other commands ask)     asking: the command's side

engine      every operation                     work        what each of them works with
decide      what a run does next: pure
sync        the run that does it                     stream      its view of the receiver
turn        up to a boundary, one point         ranges      when a range is cut
messages    the feed of logical messages within a run
closing     the ranges of a run, closed         copies      its snapshot copies, round after round
copying     one round of them, in its thread
progress    where each table stands             naming      from where on it has its name
accounting  rows that no mirror takes
drift       the catalog, looked at              backfill    ranges by hand, repair
maintenance what nobody needs goes              thinning    the same while a run goes on
recovering  what a power cut left               outcomes    how the last operations ended
sentinel    what an operator says to runs
lock, hold, requests, asking, serving, plain                other processes
observer, reports                                           what is told
"""
