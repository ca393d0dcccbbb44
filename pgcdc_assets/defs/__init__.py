"""The pipeline as Dagster definitions.

sensors, demand -> sync (the job) -> observer -> events of assets, partitions, checks

pipeline    all definitions                     resources   engine, Spark and source
assets      the assets                          keys        asset keys and op names
partitions  LSN ranges                          metadata    reports as metadata of assets
sensors     request runs                        demand      when to request a run, as a pure rule
sync        the sync and repair jobs            runs        runs that died, runs that wait, signals
observer    a run's reports as Dagster events   backlog     how far the source is ahead of the lake
checks      health as asset checks              downstream  conditions for assets built on mirrors
maintenance the maintenance job                 retention   deletes old runs and events
ownproject  one project per Dagster instance
"""
