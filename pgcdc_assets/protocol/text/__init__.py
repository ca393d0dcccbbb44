"""Turns PostgreSQL's text form into typed Arrow columns, in the same way for copies and changes.

slices -> encoded, arraytext -> types -> typed

slices      many slices of one buffer as one array
encoded     texts in the server's encoding, as UTF-8
arraytext   the text form of arrays, taken apart
types       the table of types, and their casts
typed       the columns of a mirror: typed values, the texts that no type holds, hashes of rows
"""
