"""``pgcdc``.

main        the commands, exit codes            arguments   LSNs, ranges, tables as arguments
source      setup, teardown                     sync        sync, follow, snapshot, heal, repair
status_verify  status, verify                   maintenance maintain
up          up                                  codeserver  code-server
dagsterui   `dagster dev` with a guarded webserver  sameorigin  which requests are refused
demo        demo                                forget      forget
sentinel    until, pause, resume, positions
pack        pack                                reloading   definitions loaded again as tables come and go
jobs        commands as runs of Dagster's jobs  console     progress for a person
lines       lines of output, with odd characters made visible
"""
