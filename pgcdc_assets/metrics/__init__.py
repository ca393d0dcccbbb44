"""The metrics of one source, for Prometheus. They are read from source and lake, not from the sync, so they are also
available when no sync runs.

readings -> movement -> families -> Prometheus

readings    what a scrape reads from source and lake, in threads with a time limit
movement    decides whether replication makes progress; computes the lag of each stage
families    the metrics, with their names and texts
"""
