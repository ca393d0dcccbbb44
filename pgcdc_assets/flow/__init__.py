"""The stages put together, under one lock: copy, receive, transform, apply, publish.

engine -> sync --> turn (transform, apply, publish)      one writer per lake
             |---> copying (beside the turns)
             +---> serving (what other commands ask)     asking: the command's side

engine      every operation                     work        what each of them works with
decide      what a run does next: pure
sync        the run that does it                     stream      its view of the receiver
turn        up to a boundary, one point         ranges      when a range is cut
messages    the feed of logical messages within a run
closing     a closed range's report             copying     snapshot copies within a run
progress    where each table stands             accounting  rows that no mirror takes
drift       the catalog, looked at              backfill    ranges by hand, repair
maintenance what nobody needs goes              thinning    the same while a run goes on
recovering  what a power cut left               outcomes    how the last operations ended
lock, hold, requests, asking, serving, plain                other processes
observer, reports                                           what is told
"""
