"""Spark: the session, jobs of plain functions, and the jars that pyspark lacks.

session     the session and its settings     ondemand    one session for a run, started when it is needed
tasks       one function over many specs as one job
jars        Delta's jars, resolved once      maven       artifacts into a private cache
"""
