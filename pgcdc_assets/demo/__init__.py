"""A PostgreSQL server of our own, with a sample shop: the default source.

binaries -> server -> shop <- actions <- generator

binaries    PostgreSQL's programs               server      a server in a folder
shop        its tables and first rows           actions     what customers do
generator   customers that act until they are stopped
"""
