"""The codec of pgoutput, without I/O: takes bytes and Arrow arrays, returns messages and Arrow arrays.

bytes -> frames -> messages           one by one, for control messages: decode
            |
            +----> columns -> text    whole Arrow arrays of rows at once

layouts     letters, fixed-width fields and the clock of the wire format
frames      finds the frames in the bytes of a connection; keepalive, status update
messages    the messages as dataclasses
decode      one message at a time: the reference decoder
columns     row messages by column
shape       how a relation's rows are decoded: its Relation message and the catalog's facts
text/       PostgreSQL's text form into typed columns
"""
