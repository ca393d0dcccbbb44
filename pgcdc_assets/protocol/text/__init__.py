"""Converts PostgreSQL's text form to typed Arrow columns. Snapshot copies and changes use the same code.

strings -> types -> typed

strings     makes a column of strings from slices of a buffer, in any server encoding; splits arrays into elements
types       the Arrow type for each PostgreSQL type, and the casts from text
typed       makes the columns of a mirror: typed values, the texts of values that do not fit, and hashes of rows
"""
