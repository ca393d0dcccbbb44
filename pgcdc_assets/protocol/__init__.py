"""The codec of pgoutput, without I/O: takes bytes and Arrow arrays, returns messages and Arrow arrays.

bytes -> copydata -> frames -> messages           one by one, for control messages: decode
                        |
                        +----> columns -> text    whole Arrow arrays of rows at once

layouts     letters, fixed-width fields and the clock of the wire format
copydata    finds the data messages in the bytes of a connection
frames      XLogData, keepalive, status update
messages    the messages as dataclasses
decode      one message of version 1 at a time: the reference decoder
streamed    the same for versions 2 to 4
columns     row messages by column
shape       how a relation's rows are decoded: its Relation message and the catalog's facts
text/       PostgreSQL's text form into typed columns
"""
