"""An embedded PostgreSQL server with the database of a sample shop, used if the setting `source` is `embedded`.

binaries -> server -> shop

binaries    finds PostgreSQL's programs, and runs them as a user that may run a server
server      creates, starts and stops a server in a folder
shop        the shop's tables with their first rows, the actions of its customers, and a generator that lets several
            customers act at the same time, until it is stopped
"""
