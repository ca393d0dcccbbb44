"""Makes and removes what we need on the source, and reports what is lacking.

selection -> publications -> setup

selection     which tables the settings mean, and how each can be published without harm
publications  publications of our own
adopted       findings on a publication that somebody else made
outside       findings on rows that a query of a table returns, and that its mirror does not have
setup         publications first, then the slot
transport     whether others on the way to the source can read or answer
findings      settings, free places, what is not replicated
rights        what a role may do, and the statements that give it what it lacks
script        all of that as one script for the owner
traceless     tables whose rows may change without a trace
"""
