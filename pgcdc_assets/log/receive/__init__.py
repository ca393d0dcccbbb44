"""The receiver, a separate process that turns frames from the slot into durable batches.

client (parent) <-- messages --> process -> connections -> receiver -> intake -> batches

messages           the messages between parent and receiver: settings, orders, events
client             the parent's side: starts the process, sends orders, reads events
process            the receiver's main function: reads the settings, writes events and errors
connections        opens one connection after another; reads orders
receiver           the receive loop of one connection
intake             decides which frames are added to the log, and moves the positions
messagefilter      drops the frames that the settings exclude
wholetransactions  transactions that the server sends in one piece, or sends again, and the stream's positions
blocks             transactions in progress, which the server sends in blocks
relationfacts      reads the catalog's facts about relations
batches            keeps the pending content, decides when to cut a batch, runs the writing thread
"""
