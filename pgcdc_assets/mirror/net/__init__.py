"""The net effect of changes, the same for every target: arrays in, arrays out.

keyhistory  which event decides a key, and which events hold its values
neteffect   the net effect per key              multiset    the net effect for tables without a key
"""
