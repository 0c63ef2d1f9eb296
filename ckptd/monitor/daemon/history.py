"""History file (SQLite): incidents, generations, series over time; thinning, limits, damage.

The file is bounded. A damaged one is set aside under another name, which is said, and a new one
begun: the daemon goes on without its past rather than not at all.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ckptd.decoding import msgpack_decoder
from ckptd.errors import RefusedError, StoreError, UsageError
from ckptd.monitor.daemon.documents import clipped
from ckptd.monitor.incidents import Incident

_APPLICATION = 0x636B7064  # "ckpd", in the file's header
_SCHEMA = 2
_MOST_INCIDENTS = 10_000
_MOST_GENERATIONS = 10_000
_MOST_INCIDENT_BYTES = 1 << 20
_PAGE_BYTES = 4096
_LEVELS = ((1.0, 2 * 3600.0), (60.0, 14 * 86400.0), (1800.0, 400 * 86400.0))
"""Distance of points, and how long they are kept, seconds."""

SERIES: Mapping[str, tuple[str, ...]] = {
    "step": ("step_min", "step_max"),
    "time": ("step_s_median", "step_s_p90"),
    "world": ("world", "reporting", "silent_agents"),
    "self": ("self_median", "self_max"),
    "round": ("round_ms",),
    "incidents": ("open_incidents",),
}
"""Columns of the series, by what they are about."""

_COLUMNS = tuple(name for names in SERIES.values() for name in names)
_MEANS = frozenset(SERIES["time"] + SERIES["self"])
"""Columns of which a coarser point has the mean; of others it has the largest value."""
_NEW_IN_2 = SERIES["time"]
_TABLES = f"""
CREATE TABLE incidents (
    id TEXT PRIMARY KEY, opened_at REAL NOT NULL, state TEXT NOT NULL, document BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_time ON incidents (opened_at);
CREATE TABLE generations (
    generation INTEGER PRIMARY KEY, world INTEGER, started REAL, ended REAL, why TEXT
);
CREATE TABLE about (job TEXT NOT NULL);
CREATE TABLE series (
    level INTEGER NOT NULL, at REAL NOT NULL, {", ".join(f"{name} REAL" for name in _COLUMNS)},
    PRIMARY KEY (level, at)
) WITHOUT ROWID;
"""

_INCIDENTS = (
    "SELECT document FROM incidents WHERE (? IS NULL OR state = ?)"
    " AND (? IS NULL OR opened_at < ?) ORDER BY opened_at DESC, id DESC LIMIT ?"
)


class History:
    """The history file, as the daemon writes it; may be used by several threads.

    Parameters
    ----------
    path
        The file; made if need be, mode 0600.
    most_bytes
        What it may take on the disk. Beyond it the oldest series go first.

    Raises
    ------
    StoreError
        No file can be made there.
    """

    def __init__(self, path: Path, most_bytes: int = 256 << 20) -> None:
        self.path = path
        self.errors = 0
        self.set_aside: Path | None = None
        self._lock = threading.RLock()
        self._most_pages = max(most_bytes // _PAGE_BYTES, 64)
        self._due = [0.0] * len(_LEVELS)
        self._since: list[list[list[float]]] = [[] for _ in _LEVELS]
        self._thinned = -math.inf
        self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        try:
            return _connect(self.path, self._most_pages)
        except sqlite3.DatabaseError as error:
            if not isinstance(error, sqlite3.OperationalError) or _is_other(self.path):
                self.set_aside = _set_aside(self.path)
        except RefusedError:
            self.set_aside = _set_aside(self.path)
        try:
            return _connect(self.path, self._most_pages)
        except sqlite3.Error as error:
            raise StoreError(
                "cannot write the history file",
                where=str(self.path),
                found=str(error),
                hint="ckptd serve --history FILE",
            ) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _writing(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Give the file for one change. What fails is counted, and the daemon goes on."""
        with self._lock:
            try:
                self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
                with self._db:
                    yield self._db
            except sqlite3.OperationalError:  # full, locked, a failing disk: perhaps for a while
                self.errors += 1
            except sqlite3.DatabaseError:
                self.errors += 1
                self._db.close()
                self.set_aside = _set_aside(self.path)
                self._db = self._open()

    def _read(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return rows; none, and an error counted, where they cannot be read."""
        with self._lock:
            try:
                return self._db.execute(statement, values).fetchall()
            except sqlite3.Error:
                self.errors += 1
                return []

    def put_about(self, job: str) -> None:
        """Keep whose history it is."""
        with self._writing() as db:
            db.execute("DELETE FROM about")
            db.execute("INSERT INTO about VALUES (?)", (job,))

    def put_incident(self, ident: str, opened_at: float, state: str, document: bytes) -> None:
        """Keep an incident as it is now; it is on the disk when this returns.

        Parameters
        ----------
        ident, opened_at, state
            Its id, seconds since 1970, and whether it is ``open`` or ``closed``.
        document
            All of it, encoded.
        """
        if len(document) > _MOST_INCIDENT_BYTES:
            self.errors += 1
            return
        with self._writing(durable=True) as db:
            db.execute(
                "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?)",
                (ident, opened_at, state, document),
            )

    def put_generation(
        self, generation: int, world: int, started: float, ended: float | None, why: str
    ) -> None:
        """Keep what is known of a life of the job; times are seconds since 1970."""
        with self._writing() as db:
            db.execute(
                "INSERT OR REPLACE INTO generations VALUES (?, ?, ?, ?, ?)",
                (generation, world, started, ended, why),
            )

    def put_round(self, at: float, values: Mapping[str, float]) -> None:
        """Add a point of the series at `at`, seconds since 1970; thins out what is old."""
        row = [values.get(name, math.nan) for name in _COLUMNS]
        names, places = ", ".join(_COLUMNS), ", ".join("?" * (len(row) + 2))
        with self._writing() as db:
            for level, (distance, _) in enumerate(_LEVELS):
                self._since[level].append(row)
                if at >= self._due[level]:
                    self._due[level] = at + distance
                    cells = _joined(self._since[level])
                    self._since[level] = []
                    db.execute(
                        f"INSERT OR REPLACE INTO series (level, at, {names}) VALUES ({places})",
                        (level, at, *cells),
                    )
        if at - self._thinned > 60:
            self._thinned = at
            self._thin(at)

    def _thin(self, at: float) -> None:
        with self._writing() as db:
            for level, (_, kept) in enumerate(_LEVELS):
                db.execute("DELETE FROM series WHERE level = ? AND at < ?", (level, at - kept))
            _keep_newest(db, "incidents", "id", "opened_at", _MOST_INCIDENTS)
            _keep_newest(db, "generations", "generation", "generation", _MOST_GENERATIONS)
            if self._used() > 0.9 * self._most_pages:
                # The finest half goes; pages that become free are used again.
                db.execute(
                    "DELETE FROM series WHERE level = 0 AND at < "
                    "(SELECT avg(at) FROM series WHERE level = 0)"
                )

    def _used(self) -> int:
        pages = int(self._db.execute("PRAGMA page_count").fetchone()[0])
        return pages - int(self._db.execute("PRAGMA freelist_count").fetchone()[0])

    # -- reading ----------------------------------------------------------------------------------

    def incidents(
        self, state: str | None = None, before: float | None = None, limit: int = 100
    ) -> list[bytes]:
        """Return encoded incidents, the newest first; see `read_incidents`."""
        return [bytes(row[0]) for row in self._read(_INCIDENTS, _filter(state, before, limit))]

    def incident(self, ident: str) -> bytes | None:
        """Return one encoded incident."""
        rows = self._read("SELECT document FROM incidents WHERE id = ?", (ident,))
        return bytes(rows[0][0]) if rows else None

    def generations(self) -> list[tuple[Any, ...]]:
        """Return (generation, world, started, ended, why) of the lives of the job, oldest first."""
        return self._read(
            "SELECT generation, world, started, ended, why FROM generations"
            " ORDER BY generation DESC LIMIT 1000"
        )[::-1]

    def series(
        self, what: Sequence[str], since: float, until: float = math.inf, points: int = 1000
    ) -> dict[str, list[float | None]]:
        """Return columns ``at`` and those of `SERIES` between two moments, seconds since 1970.

        The finest level that reaches back so far is used, joined to at most `points` points.
        """
        return _series(self._read, what, since, until, points)


def _series(
    read: Callable[[str, tuple[Any, ...]], list[tuple[Any, ...]]],
    what: Sequence[str],
    since: float,
    until: float,
    points: int,
) -> dict[str, list[float | None]]:
    names = [name for one in what for name in SERIES[one]]
    # A level that has all that there ever was serves as well, however far back is asked for.
    firsts = dict(read("SELECT level, min(at) FROM series GROUP BY level", ()))
    since = max(since, min(firsts.values(), default=since))
    level = next(
        (
            n
            for n, (_, kept) in enumerate(_LEVELS)
            if since >= time.time() - kept or firsts.get(n, math.inf) <= since
        ),
        len(_LEVELS) - 1,
    )
    where = (level, since, min(until, 1e12))
    ends = read("SELECT min(at), max(at) FROM series WHERE level = ? AND at BETWEEN ? AND ?", where)
    first, last = ends[0] if ends and ends[0][0] is not None else (0.0, 0.0)
    # Counted from the newest, so that what is shown last stays.
    wide = max((last - first) / max(points - 1, 1), _LEVELS[level][0] / 2)
    joined = [f"{'avg' if name in _MEANS else 'max'}({name})" for name in names]
    rows = read(
        f"SELECT max(at), {', '.join(joined)} FROM series WHERE level = ? AND at BETWEEN ? AND ?"
        " GROUP BY CAST((? - at) / ? AS INTEGER) ORDER BY 1",
        (*where, last, wide),
    )
    columns = list(zip(*rows, strict=True)) or [()] * (len(names) + 1)
    return {name: list(c) for name, c in zip(("at", *names), columns, strict=True)}


def _joined(rows: Sequence[Sequence[float]]) -> list[float | None]:
    """Return one point for several: means of what a step takes, else the largest value."""
    out: list[float | None] = []
    for name, column in zip(_COLUMNS, zip(*rows, strict=True), strict=True):
        known = [value for value in column if math.isfinite(value)]
        mean = sum(known) / max(len(known), 1)
        out.append((mean if name in _MEANS else max(known)) if known else None)
    return out


def read_incidents(
    path: Path, state: str | None = None, before: float | None = None, limit: int = 100
) -> list[bytes]:
    """Return encoded incidents of a history file, the newest first, without a daemon.

    Parameters
    ----------
    path
        The file; it may be in use.
    state
        ``open`` or ``closed``; both if left out.
    before
        Only those opened before this, seconds since 1970.
    limit
        At most so many.

    Raises
    ------
    UsageError
        It is not a history, or damaged.
    """
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)
        ) as db:
            _check(db)
            rows = db.execute(_INCIDENTS, _filter(state, before, limit)).fetchall()
            return [bytes(row[0]) for row in rows]
    except (sqlite3.Error, RefusedError) as error:
        raise UsageError(
            "not a history file, or a damaged one",
            where=str(path),
            found=str(error).partition("\n")[0],
        ) from error


def jobs_beside(path: Path) -> dict[str, Path]:
    """Return the history files in the folder of `path`, its own included, by the job's name."""
    found = {}
    for other in sorted(path.parent.glob("*.sqlite")):
        rows = _read_of(other, "SELECT job FROM about", ())
        found.update({str(row[0]): other for row in rows})
    return found


def read_series(
    path: Path, what: Sequence[str], since: float, until: float, points: int
) -> dict[str, list[float | None]]:
    """Return what `History.series` does of a file that another daemon writes, or wrote."""
    return _series(functools.partial(_read_of, path), what, since, until, points)


def _read_of(path: Path, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return rows of another's file; none where it cannot be read."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5)) as db:
            return db.execute(statement, values).fetchall()
    except sqlite3.Error:
        return []


def _filter(state: str | None, before: float | None, limit: int) -> tuple[Any, ...]:
    return state, state, before, before, limit


def _keep_newest(db: sqlite3.Connection, table: str, key: str, by: str, most: int) -> None:
    db.execute(
        f"DELETE FROM {table} WHERE {key} IN"
        f" (SELECT {key} FROM {table} ORDER BY {by} DESC LIMIT -1 OFFSET ?)",
        (most,),
    )


def _connect(path: Path, most_pages: int) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    # The daemon hands it from thread to thread, one at a time.
    db = sqlite3.connect(path, timeout=5, check_same_thread=False)
    try:
        db.execute(f"PRAGMA page_size={_PAGE_BYTES}")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA max_page_count={most_pages}")
        db.execute("PRAGMA journal_size_limit=4194304")
        if db.execute("PRAGMA schema_version").fetchone()[0] == 0:
            db.executescript(
                f"BEGIN; {_TABLES} PRAGMA application_id={_APPLICATION};"
                f" PRAGMA user_version={_SCHEMA}; COMMIT;"
            )
        if _version(db) == (_APPLICATION, 1):
            new = "".join(f"ALTER TABLE series ADD COLUMN {name} REAL; " for name in _NEW_IN_2)
            db.executescript(
                f"BEGIN; {new} CREATE TABLE about (job TEXT NOT NULL);"
                f" PRAGMA user_version={_SCHEMA}; COMMIT;"
            )
        _check(db)
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
    except BaseException:
        db.close()
        raise
    return db


def _version(db: sqlite3.Connection) -> tuple[int, int]:
    application = int(db.execute("PRAGMA application_id").fetchone()[0])
    return application, int(db.execute("PRAGMA user_version").fetchone()[0])


def _check(db: sqlite3.Connection) -> None:
    application, schema = _version(db)
    # What is read of incidents is the same in all versions so far.
    if application != _APPLICATION or not 1 <= schema <= _SCHEMA:
        raise RefusedError(
            "the file belongs to another program or version", found=f"{application:#x}, {schema}"
        )


def _is_other(path: Path) -> bool:
    """Whether a file's tables are not ours, which SQLite tells like a passing failure."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            _check(db)
            return False
    except RefusedError:
        return True
    except (sqlite3.Error, ValueError):
        return False


def _set_aside(path: Path) -> Path:
    """Rename a damaged file with what belongs to it; return its new name."""
    target = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    for end in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{end}", f"{target}{end}")
    return target


# --- incidents as bytes -------------------------------------------------------------------------

_decoder = msgpack_decoder(Incident)


def to_stored(incident: Incident) -> bytes:
    """Return an incident as the file holds it; of too much evidence the rest is left out."""
    return msgspec.msgpack.encode(clipped(incident))


def from_stored(data: bytes) -> Incident | None:
    """Return the incident that the file holds; None if another version wrote it."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return None
