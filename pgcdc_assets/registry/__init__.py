"""Registers mirrors in the catalogs of query engines, so that SQL users find them by name.

named  the content of a catalog entry for a mirror, and the interface of a registry
unity  Unity Catalog, through its REST API
glue   the Glue Data Catalog of AWS, through boto3
hive   a Hive metastore, through the client in Spark's JVM
"""
