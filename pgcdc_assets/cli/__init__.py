"""The command line, ``pgcdc``.

main           the commands, exit codes
source         setup, teardown
sync           sync, follow, snapshot, heal, repair, until, pause, resume
status_verify  status, positions, verify
metrics        metrics
maintenance    maintain, forget
sql            sql
up             up, code-server, pack
dagsterui      `dagster dev` with a webserver that refuses requests from other web pages
demo           demo
jobs           commands as runs of Dagster's jobs
arguments      reads LSNs, ranges, tables and the option --component from arguments; adds topics and examples to the
               help of commands
console        prints lines, and shows the progress of a run on a terminal
"""
