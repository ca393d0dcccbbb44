"""Creates and removes publications and slot on the source, and reports what is missing for them.

selection -> publications -> setup

selection     which tables the settings select, and how each table can be published without harm
publications  creates our publications and keeps them up to date
adopted       findings on a publication that somebody else made
outside       findings on rows that a query of a table returns and its mirror does not have
setup         creates the publications first, then the slot
transport     finding on a connection that others can read or answer
findings      findings on settings, free slots and walsenders, and objects that are not replicated
rights        findings on the rights of a role, with the statements that grant them
script        one script for the owner, with all statements
traceless     findings on tables whose rows may change without a trace
"""
