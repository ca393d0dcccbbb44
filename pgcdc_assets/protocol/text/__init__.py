"""Converts PostgreSQL's text form to typed Arrow columns. Snapshot copies and changes use the same code.

strings -> types -> typed

strings     makes columns of strings from slices of a buffer, in any encoding of a server; splits arrays into elements
types       the Arrow type for each PostgreSQL type, and the casts from text
typed       makes the columns of a mirror: typed values, texts that do not fit their type, hashes of rows
"""
