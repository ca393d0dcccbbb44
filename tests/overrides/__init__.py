"""Overrides: each override breaks one promise by replacing a function of the package. A test must then fail.

``python -m tests.overrides.run [NAME ...]`` runs the overrides (``make overrides``).

    override.py   what an override is, and how functions are changed
    applied.py    replaces the function when its module is imported
    site/         a folder for PYTHONPATH, so that every Python process of a test, also Spark's workers, applies the
                  override
    run.py        the command
    log.py source.py rows.py tables.py flow.py
                  the overrides by theme
    survivors.md  mutants of the pure packages that no test notices, with the reason (``make mutation``)
"""
