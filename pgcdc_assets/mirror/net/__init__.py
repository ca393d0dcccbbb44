"""The net effect of changes, whatever the target: arrays in, arrays out.

chains      which event of a key decides, and where its values stand
keyed       the net effect per key              multiset    the same for tables without a key
"""
