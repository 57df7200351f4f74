"""Statements over the table of a user's projection, in one SQL dialect, for any driver.

SQLAlchemy writes the SQL and knows how each type travels; the statements are run by the store itself, beside its own,
on whatever connection the transaction is. So values are converted here as SQLAlchemy's own execution would.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.base import Executable

from keiro.errors import InvalidCall, MigrationRequired
from keiro.projections.base import Key, ReadModel
from keiro.stores.faults import postgres_fault, sqlite_fault
from keiro.stores.migrate import MIGRATION_LOCK
from keiro.stores.sql import Row, Statement

_MOST: Final = 128  # rows of one statement; fewer are sent in statements of 64, 32, … rows, so that few texts exist
_NUMERIC_OID: Final = 1700
_FLOAT_OID: Final = 701

Convert = Callable[[Any], Any] | None


def own_dialect(name: str) -> Dialect:
    """The dialect of the store's own connections: `sqlite` by sqlite3 or `postgresql` by psycopg."""
    if name == "sqlite":
        from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

        return _like(SQLiteDialect_pysqlite)
    from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

    return _like(PGDialect_psycopg)


def like_dialect(dialect: Dialect) -> Dialect:
    """The dialect of a caller's SQLAlchemy connection, writing `?` for parameters as all our statements do."""
    kind: Any = type(dialect)
    made: Dialect = _like(kind)
    return made


@cache
def _like(kind: Any) -> Dialect:
    made: Dialect = kind(dbapi=kind.import_dbapi(), paramstyle="qmark")
    return made


class RowStatements:
    """The statements one projection needs, with their texts cached."""

    def __init__(self, model: ReadModel, dialect: Dialect) -> None:
        self.model = model
        self._dialect = dialect
        self._columns = list(model.table.columns)
        self._keys = list(model.table.primary_key.columns)
        for name in (model.table.fullname, *(column.name for column in self._columns)):
            if "?" in name or "%" in name:
                raise InvalidCall(f"projection {model.name!r}: {name!r} cannot name a table or column: no '?' or '%'")
        self._bind = [_binder(column, dialect) for column in self._columns]
        self._bind_key = [_binder(column, dialect) for column in self._keys]
        self._read = [_reader(column, dialect) for column in self._columns]
        self._texts: dict[tuple[str, int], tuple[str, list[int]]] = {}

    def select_keys(self, keys: Sequence[Key]) -> list[Statement]:
        """Select the rows of these keys."""
        return self._by_key("select", keys)

    def delete(self, keys: Sequence[Key]) -> list[Statement]:
        """Delete the rows of these keys."""
        return self._by_key("delete", keys)

    def put(self, rows: Sequence[Mapping[str, Any]]) -> list[Statement]:
        """Insert rows, or replace those of the same key; for an append-only table insert them."""
        names = self.model.columns
        done: list[Statement] = []
        for part in _parts(rows):
            text, order = self._text("insert" if self.model.append_only else "put", len(part))
            values = [_bound(bind, row[name]) for row in part for name, bind in zip(names, self._bind, strict=True)]
            done.append((text, [values[i] for i in order]))
        return done

    def select(self, equals: Mapping[str, Any]) -> Statement:
        """Select the rows whose columns have these values."""
        where: list[ColumnElement[bool]] = []
        values: list[Any] = []
        for name, value in equals.items():
            column = self.model.table.columns[name]
            if value is None:
                where.append(column.is_(None))
            else:
                where.append(column == sa.bindparam(f"p{len(values)}", type_=column.type))
                values.append(_bound(_binder(column, self._dialect), value))
        text, order = self._compile(sa.select(*self._columns).where(*where))
        return text, [values[i] for i in order]

    def any_row(self) -> Statement:
        """Whether the table has rows."""
        one: ColumnElement[int] = sa.literal_column("1")
        return self._compile(sa.select(one).where(sa.exists(sa.select(one).select_from(self.model.table))))[0], ()

    def rows(self, found: Iterable[Row]) -> list[dict[str, Any]]:
        """Rows as the table's columns say them."""
        names, readers = self.model.columns, self._read
        return [
            {
                name: value if read is None else read(value)
                for name, read, value in zip(names, readers, row, strict=True)
            }
            for row in found
        ]

    def same(self, one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
        """Whether two rows are the same to the database: SQLite drops the zone of a time, JSON has no tuples."""
        if one is None or other is None or one == other:
            return one is other or one == other
        return all(
            one[name] == other[name] or _sent(_bound(bind, one[name])) == _sent(_bound(bind, other[name]))
            for name, bind in zip(self.model.columns, self._bind, strict=True)
        )

    def _by_key(self, what: str, keys: Sequence[Key]) -> list[Statement]:
        done: list[Statement] = []
        for at in range(0, len(keys), _MOST):
            part = list(keys[at : at + _MOST])
            # Filled up with the last key, which changes nothing, so that there are few texts.
            part += [part[-1]] * ((1 << (len(part) - 1).bit_length()) - len(part))
            text, order = self._text(what, len(part))
            values = [_bound(bind, one) for key in part for one, bind in zip(key, self._bind_key, strict=True)]
            done.append((text, [values[i] for i in order]))
        return done

    def _text(self, what: str, n: int) -> tuple[str, list[int]]:
        found = self._texts.get((what, n))
        if found is None:
            found = self._texts[what, n] = self._compile(self._statement(what, n))
        return found

    def _statement(self, what: str, n: int) -> Executable:
        table = self.model.table
        if what in ("insert", "put"):
            columns = self._columns
            rows = [
                {c.key: sa.bindparam(f"p{i * len(columns) + j}", type_=c.type) for j, c in enumerate(columns)}
                for i in range(n)
            ]
            return sa.insert(table).values(rows) if what == "insert" else self._upsert(rows)
        width = len(self._keys)
        marks = [[sa.bindparam(f"p{i * width + j}", type_=c.type) for j, c in enumerate(self._keys)] for i in range(n)]
        where: ColumnElement[bool]
        if width == 1:
            where = self._keys[0].in_([mark for (mark,) in marks])
        else:
            where = sa.or_(*(sa.and_(*(c == m for c, m in zip(self._keys, row, strict=True))) for row in marks))
        return sa.select(*self._columns).where(where) if what == "select" else sa.delete(table).where(where)

    def _upsert(self, rows: list[dict[str, Any]]) -> Executable:
        others = [column for column in self._columns if not column.primary_key]
        # The two dialects' constructs are alike, but share no type.
        insert: Any = postgresql.insert if self._dialect.name == "postgresql" else sqlite.insert
        statement = insert(self.model.table).values(rows)
        if not others:
            done: Executable = statement.on_conflict_do_nothing(index_elements=self._keys)
        else:
            given = statement.excluded
            done = statement.on_conflict_do_update(
                index_elements=self._keys, set_={column.name: given[column.key] for column in others}
            )
        return done

    def _compile(self, statement: Any) -> tuple[str, list[int]]:
        compiled: Any = statement.compile(dialect=self._dialect)
        return compiled.string, [int(name[1:]) for name in compiled.positiontup or ()]


def _parts(rows: Sequence[Any]) -> list[Sequence[Any]]:
    parts: list[Sequence[Any]] = []
    at, size = 0, _MOST
    while at < len(rows):
        while size > len(rows) - at:
            size //= 2
        parts.append(rows[at : at + size])
        at += size
    return parts


def _sent(value: Any) -> Any:
    # psycopg wraps JSON in objects that compare by identity.
    return json.dumps(value.obj, default=repr) if hasattr(value, "obj") else value


def _bound(bind: Convert, value: Any) -> Any:
    return value if bind is None else bind(value)


def _binder(column: sa.Column[Any], dialect: Dialect) -> Convert:
    return column.type.dialect_impl(dialect).bind_processor(dialect)


def _reader(column: sa.Column[Any], dialect: Dialect) -> Convert:
    impl = column.type.dialect_impl(dialect)
    # Numeric types of psycopg ask what came over the wire: what the column is declared as.
    wire = _FLOAT_OID if isinstance(impl, sa.Float) else _NUMERIC_OID
    return impl.result_processor(dialect, wire)


def create_on_sqlite(path: str, models: Sequence[ReadModel], *, create: bool) -> None:
    """Create, or check, the tables of projections in a SQLite file. Blocks while another process holds its lock."""
    # Autocommit, so that ours is the only BEGIN: of several processes that create, one does and the others see it.
    engine = sa.create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(path, timeout=30, isolation_level=None),
        poolclass=sa.pool.NullPool,
    )
    try:
        with engine.connect() as connection:
            if create:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            _create(connection, models, create, f"sqlite:///{path}")
            connection.commit()
    except sa.exc.DBAPIError as error:
        raise sqlite_fault(error, path) from error


def create_on_postgres(connect: Callable[[], Any], models: Sequence[ReadModel], *, create: bool, target: str) -> None:
    """Create, or check, the tables of projections in the database that `connect` opens, by one process at a time."""
    engine = sa.create_engine("postgresql+psycopg://", creator=connect, poolclass=sa.pool.NullPool)
    try:
        with engine.connect() as connection:
            if create:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            _create(connection, models, create, target)
            connection.commit()
    except sa.exc.DBAPIError as error:
        raise postgres_fault(getattr(error.orig, "sqlstate", None), str(error.orig), target) from error


def _create(connection: sa.Connection, models: Sequence[ReadModel], create: bool, target: str) -> None:
    for model in models:
        if create:
            model.table.metadata.create_all(connection, tables=[model.table], checkfirst=True)
        schema = model.table.schema
        inspector = sa.inspect(connection)
        if not inspector.has_table(model.table.name, schema=schema):
            raise MigrationRequired(
                f"projection {model.name!r}: {target} has no table {model.table.fullname}. Create it, or open an "
                "engine with migrate=True"
            )
        there = {column["name"] for column in inspector.get_columns(model.table.name, schema=schema)}
        missing = [column.name for column in model.table.columns if column.name not in there]
        if missing:
            raise MigrationRequired(
                f"projection {model.name!r}: table {model.table.fullname} of {target} lacks {', '.join(missing)}. Add "
                "what is missing; or drop the table, open an engine with migrate=True and rebuild the projection"
            )
