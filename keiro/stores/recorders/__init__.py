"""The `eventsourcing` library's recorder contracts over memory, SQLite and Postgres.

`PERSISTENCE_MODULE=keiro.stores.sqlite` (or `.memory`, `.postgres`) makes an `Application` of that library
record here, with that library's own settings, tables and stored format. Nothing else needs to change.
"""
