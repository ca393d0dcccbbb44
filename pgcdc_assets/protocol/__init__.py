"""The codec of pgoutput, pure: bytes and Arrow arrays in, messages and Arrow arrays out.

bytes -> copydata -> frames -> messages           one by one, for control messages: decode
                        |
                        +----> columns -> text    whole Arrow arrays of rows at once

layouts     letters, fixed-width fields and the clock, each once
copydata    where the data messages of a connection lie
frames      XLogData, keepalive, status update
messages    the messages as values
decode      one message of version 1 at a time: the reference decoder
streamed    the same for versions 2 to 4
columns     row messages by column
shape       how a relation's rows are to be decoded: its Relation message and the catalog's facts
text/       PostgreSQL's text form into typed columns
"""
