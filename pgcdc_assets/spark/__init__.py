"""Spark: the session, jobs of plain functions, and the jars that pyspark lacks.

session        the session                        ondemand    one session for a run, started when it is needed
configuration  its settings                       executors   how many tasks run at a time; waiting for a cluster
tasks          one function over many specs       attempt     what a worker does with one of them
               as one job
versions       what must be the same on driver    archive     this environment as an archive for the executors
               and workers
jars           Delta's jars, resolved once        maven       artifacts into a private cache
"""
