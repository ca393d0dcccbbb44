"""Creates and removes publications and slot on the source, and reports missing requirements.

selection -> publications -> setup

selection      which tables the settings select, and how each table can be published without harm
publications   creates our publications and keeps them up to date
setup          creates the publications first, then the slot; removes them again
findings       findings on the server: settings, free slots, network path, objects that are not replicated
tablefindings  findings on tables, in our publications and in a publication that somebody else made
rights         findings on the rights of a role, and a script with all statements for the owner
"""
