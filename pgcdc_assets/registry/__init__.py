"""Registers mirrors in the catalogs of query engines, so that SQL users find them by name.

named  a mirror as a catalog shows it, and the contract of a registry
unity  Unity Catalog, through its REST API
glue   the Glue Data Catalog of AWS, through boto3
hive   a Hive metastore, through the client in Spark's JVM
"""
