"""An embedded PostgreSQL server with a sample shop. It is the source `embedded`.

binaries -> server -> shop <- actions <- generator

binaries    PostgreSQL's programs               server      a server in a folder
shop        the shop's tables and first rows    actions     what customers do
generator   customers that act until they are stopped
"""
