"""An embedded PostgreSQL server with a sample shop. It is the source `embedded`.

binaries -> server -> shop -> generator

binaries    PostgreSQL's programs               server      a server in a folder
shop        the shop: its tables and first      generator   customers that act until they are stopped
            rows, and what customers do
"""
