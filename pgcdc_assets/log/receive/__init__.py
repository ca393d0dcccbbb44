"""The receiver, a separate process: turns frames from the slot into durable batches.

client (parent) <-- messages --> process -> receiver -> intake

messages    settings and orders in, events out

client      the parent's side              process     the process: reads orders, writes events
orders      reads orders from the pipe         connections receives over one connection after another
fallback    whether the next connection may stream

describe    reads the catalog's facts about relations
receiver    the loop                       batches     what is pending, and when a batch is cut
                                           writing     the writing thread
intake      what frames mean for the positions    parts       the results of the intake
streampositions  the stream's positions and goal  whole       transactions that come as a whole
blocks      blocks of transactions in progress    announce    reports transactions in progress to `status`
choice      which frames the settings ask for
overlap     checks that what the server sends again matches the lake
"""
