"""Every Python process imports this at its start if the folder is on its PYTHONPATH."""

import os

if "PGCDC_TEST_OVERRIDE" in os.environ:
    from tests.overrides.applied import VARIABLE, apply

    apply(os.environ[VARIABLE])
