"""The metrics of one source, for Prometheus. Reads source and lake, so that they are there when the sync is dead.

readings --> families (and movement)      values, read in threads with a time limit      -> Prometheus' families

readings    what a scrape reads: the source part, and the lake part
movement    whether replication moves, and for how long something has waited
families    the metrics, with their names and texts
"""
