"""The command line, ``pgcdc``.

main           the commands, exit codes
source         setup, teardown
sync           sync, follow, snapshot, heal, repair, until, pause, resume
status_verify  status, positions, verify
metrics        metrics
maintenance    maintain, forget
sql            sql
up             up                               dagsterui   `dagster dev`, which refuses requests of other web pages
deploy         code-server, pack
demo           demo
jobs           commands as runs of Dagster's jobs
dagsterproject settings from a component of a Dagster project
arguments      LSNs, ranges, tables as arguments; topics and examples in the help of commands
console        lines of output, and what a run shows on a terminal
"""
