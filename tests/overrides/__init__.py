"""Promises taken out one by one: each override replaces a function of the package, and its test must then fail.

``python -m tests.overrides.run [NAME ...]`` runs them (``make overrides``).

    override.py   what an override is, and how functions are changed
    applied.py    puts the replacement in place as its module is imported
    site/         a folder for PYTHONPATH: every Python process of a test, Spark's workers too, applies the override
    run.py        the command
    log.py source.py rows.py tables.py flow.py
                  the overrides by theme
    survivors.md  mutants of the pure packages that no test notices, with the reason (``make mutation``)
"""
