"""An embedded PostgreSQL server with a sample shop: the source `embedded`.

binaries -> server -> shop -> generator

binaries    PostgreSQL's programs               server      a server in a folder
shop        the shop's tables, first rows       generator   customers that act until they are stopped
            and actions
"""
