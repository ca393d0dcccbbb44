"""What is published, each in a small Delta table that only grows.

points      consistent points: at which LSN which version of each mirror stands
states      the state of each table             untaken     rows that no mirror took
ledger      one such table: rows in the order of their times
recovery    repairs what a power cut left of them
upkeep      deletes the files of them that nobody needs
"""
