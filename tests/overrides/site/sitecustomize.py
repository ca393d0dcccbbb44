"""Applies the override. Every Python process imports this module at its start if this folder is on its PYTHONPATH."""

import os

if "PGCDC_TEST_OVERRIDE" in os.environ:
    from tests.overrides.applied import VARIABLE, apply

    apply(os.environ[VARIABLE])
