"""Turns PostgreSQL's text form into typed Arrow columns. Copies and changes use the same code.

slices -> encoded, arraytext -> types -> typed

slices      turns many slices of one buffer into one array
encoded     converts texts in the server's encoding to UTF-8
arraytext   splits the text form of arrays into elements
types       the table of types, and their casts
typed       the columns of a mirror: typed values, texts that do not fit their type, hashes of rows
"""
