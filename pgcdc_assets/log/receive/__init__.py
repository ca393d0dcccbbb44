"""The receiver, a process of its own: frames from the slot into durable batches.

client (parent) <-- messages --> process -> receiver -> intake

messages    settings and orders in, events out

client      the parent's side              process     the process: orders in, events out
describe    what the catalog says of relations
receiver    the loop                       intake      what frames mean for the positions
choice      which frames the settings ask for
overlap     what the server sends again is what the lake holds
"""
