"""Turns PostgreSQL's text form into typed Arrow columns. Copies and changes use the same code.

strings -> arraytext -> types -> typed

strings     columns of strings: from slices of a buffer, in any encoding of a server
arraytext   splits the text form of arrays into elements
types       the table of types, and their casts
typed       the columns of a mirror: typed values, texts that do not fit their type, hashes of rows
"""
