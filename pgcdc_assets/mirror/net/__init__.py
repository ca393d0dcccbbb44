"""The net effect of changes, the same for every target: arrays in, arrays out.

keyhistory  which event decides whether a key exists, and which events hold its row's values
neteffect   the net effect for tables with and without a key
"""
