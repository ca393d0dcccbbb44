"""Creates and removes publications and slot on the source, and reports what pgcdc needs and does not find there.

A **finding** is one such report: an error, a warning or an information, with advice. "Our" publications are those that
``pgcdc setup`` created for this project's slot.

selection -> publications -> setup

selection      which tables the settings select, and how each table can be published so that no write on it fails
publications   creates our publications, and keeps their tables up to date
setup          creates the publications, then the slot; removes them again
findings       findings on the server: settings, free slots, network path, objects that are not replicated
tablefindings  findings on tables, in our publications and in a publication that somebody else made
rights         findings on the rights of a role, and a script with all statements for the owner of the tables
"""
