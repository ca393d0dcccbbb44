"""The pipeline as Dagster definitions.

sensors, demand -> sync (the job) -> observer -> events of assets, partitions, checks

pipeline     all definitions of a source, as a function and as a component for `dg`
replication  what definitions and runs share: settings, names, specs of assets, and the translator
keys         the names under which Dagster knows a source
resources    engine, Spark and source; for assets built on mirrors: the lake, and a condition
assets       the assets
partitions   LSN ranges of one source
metadata     turns reports into metadata of assets
sensors      requests runs
demand       decides whether to request a run, without I/O
sync         the sync and repair jobs
runs         finds runs that died and runs that wait; ends runs at signals
observer     records a run's reports as Dagster events
checks       health as asset checks
verification ``verify`` as an asset check
maintenance  the job that deletes old data and old runs of Dagster
dagsterinternals  all uses of Dagster's private API
"""
