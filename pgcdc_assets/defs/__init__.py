"""The pipeline as Dagster sees it: assets, partitions, the sync job and its sensor, checks."""
