"""The ``pgcdc`` command."""
