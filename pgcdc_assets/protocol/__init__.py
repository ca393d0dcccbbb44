"""The codec of pgoutput (protocol version 1), pure: bytes and Arrow arrays in, messages and Arrow arrays out."""
