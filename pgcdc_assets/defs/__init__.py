"""The pipeline as Dagster definitions.

sensors, demand -> sync (the job) -> observer -> events of assets, partitions, checks

component   a source as a component for `dg`    pipeline    all definitions of a source
replication what definitions and runs share:    keys        the names that Dagster sees of a source
            settings, names, specs; translator
resources   engine, Spark and source            assets      the assets
partitions  LSN ranges of one source            metadata    reports as metadata of assets
sensors     request runs                        demand      when to request a run, as a pure rule
sync        the sync and repair jobs            runs        runs that died, runs that wait, signals
observer    a run's reports as Dagster events   checks      health as asset checks
maintenance the job that deletes old data,      verification verify as an asset check
            and old runs of Dagster
dagsterinternals  what is used of Dagster's private API
downstream  for assets built on mirrors: conditions, and mirrors as inputs
"""
