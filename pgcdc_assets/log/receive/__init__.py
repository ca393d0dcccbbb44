"""The receiver, a process of its own: frames from the slot into durable batches.

client (parent) <-- messages --> process -> receiver -> intake

messages    settings and orders in, events out

client      the parent's side              process     the process: orders in, events out
orders      as they are taken                  connections one after the other
fallback    whether the next one may stream

describe    what the catalog says of relations
receiver    the loop                       batches     what is pending, when it is cut
                                           writing     the other thread
intake      what frames mean for the positions         parts     what it makes of them
streampositions  where it stands, and its goal    whole       transactions that come as a whole
blocks      of transactions in progress    announce    which there are, for `status`
choice      which frames the settings ask for
overlap     what the server sends again is what the lake holds
"""
