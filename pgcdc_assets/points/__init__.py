"""What is published, each in a small Delta table that only grows.

points      consistent points: at which LSN which version of each mirror stands
states      the state of each table             untaken     rows that no mirror took
ledger      such a table: rows in the order of their times
recovery    what a power cut left of them, mended
upkeep      what nobody needs of them goes
"""
