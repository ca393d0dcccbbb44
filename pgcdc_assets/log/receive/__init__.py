"""The receiver, a separate process: turns frames from the slot into durable batches.

client (parent) <-- messages --> process -> connections -> receiver -> intake -> batches

messages           settings and orders in, events out
client             the parent's side
process            the process: reads settings, writes events
connections        receives over one connection after another; reads orders
receiver           the loop over one connection
intake             what frames mean for the positions
messagefilter      which frames the settings ask for
wholetransactions  transactions that come as a whole, and the stream's positions
resendcheck        checks that what the server sends again matches the lake
blocks             blocks of transactions in progress
relationfacts      the catalog's facts about relations
batches            what is pending, when a batch is cut, and the writing thread
progressfile       reports transactions in progress to `status`
"""
