"""The pipeline as Dagster sees it.

sensors, demand -> sync (the job) -> observer -> events of assets, partitions, checks

pipeline    all definitions                     resources   source and Spark
assets      the assets                          keys        their keys
partitions  LSN ranges                          metadata    reports as metadata of assets
sensors     ask for runs                        demand      when to ask, as a pure rule
sync        the sync job                        runs        what Dagster knows of its runs
observer    a run's events as Dagster's         backlog     how much the slot holds
checks      health as asset checks              downstream  what follows a mirror
maintenance the maintenance job                 retention   runs and events that are old
ownproject  one project in an instance
"""
