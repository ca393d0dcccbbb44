"""Decodes pgoutput's messages. Nothing here does I/O: the functions convert bytes and Arrow arrays.

bytes -> frames -> decode -> messages   control messages, one at a time
            |
            +----> columns -> text      row messages, a whole Arrow array at a time

layouts     letters, fixed-width fields and the clock of the wire format
frames      finds the frames in the bytes of a connection; keepalives and status updates
messages    the messages as dataclasses
decode      the reference decoder, for one message at a time
columns     decodes many row messages at once, column by column
shape       what is needed to decode a relation's rows: its Relation message and the catalog's facts
text/       converts PostgreSQL's text form to typed columns
"""
