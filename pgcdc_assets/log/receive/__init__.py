"""The receiver, a process of its own: frames from the slot into durable batches.

client (parent) <-- pipe --> process -> receiver -> intake

client      the parent's side              process     the process: orders in, events out
receiver    the loop                       intake      what frames mean for the positions
overlap     what the server sends again is what the lake holds
"""
