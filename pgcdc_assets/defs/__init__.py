"""The pipeline as Dagster definitions.

sensors, demand -> sync (the job) -> observer -> events of assets, partitions, checks

pipeline    all definitions                     resources   engine, Spark and source
assets      the assets                          keys        asset keys and op names
partitions  LSN ranges of one project           metadata    reports as metadata of assets
sensors     request runs                        demand      when to request a run, as a pure rule
sync        the sync and repair jobs            runs        runs that died, runs that wait, signals
observer    a run's reports as Dagster events   checks      health as asset checks
maintenance the job that deletes old data, and old runs of Dagster
downstream  conditions for assets built on mirrors
"""
