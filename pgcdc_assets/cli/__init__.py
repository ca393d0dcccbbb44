"""The command line, ``pgcdc``.

main        the commands, exit codes            arguments   LSNs, ranges, tables as arguments
source      setup, teardown                     sync        sync, follow, snapshot, heal, repair
status_verify  status, verify                   maintenance maintain
up          up                                  codeserver  code-server
dagsterui   `dagster dev` with a guarded webserver  sameorigin  refuses requests of other web pages
demo        demo                                forget      forget
sentinel    until, pause, resume, positions
pack        pack                                reloading   has Dagster reload its definitions
jobs        commands as runs of Dagster's jobs  console     progress for the user
lines       lines of output, with control characters made visible
"""
