"""Decodes pgoutput's messages. Nothing here does I/O: the functions take and return bytes and Arrow arrays.

bytes -> frames -> decode -> messages   control messages, one at a time
            |
            +----> columns -> text      row messages, a whole Arrow array at a time

layouts     letters, fixed-width fields and the clock of the wire format
frames      finds the frames in the bytes of a connection; keepalives and status updates
messages    a dataclass for each message
decode      decodes one message at a time: control messages; tests compare columns with it
columns     decodes many row messages (insert, update, delete) at once, column by column
shape       what is needed to decode a relation's rows: its Relation message, and facts of the catalog
text/       converts PostgreSQL's text form to typed columns
"""
