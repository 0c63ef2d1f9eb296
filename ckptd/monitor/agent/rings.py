"""Ring files of a node: found, opened, refused when damaged or foreign, removed when old.

In it: how often folders are looked at; after which time a ring is stale.

Nothing in a ring is trusted, and nothing in the folder either: files of other users are not
opened, and one that is damaged is reported once and left alone until it is another file.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

from ckptd.errors import CkptdError
from ckptd.monitor.agent.processes import Doing, Process
from ckptd.monitor.ring import Counter, RecorderState, RingHeader, RingReader

_log = logging.getLogger("ckptd.monitor")
_SUFFIX = ".ring"
_MOST_FILES = 4096
_SCAN_S = 2.0
"""The folder is looked through this often even if its time does not move."""
_PROOF_S = 1.0
_SILENT_S = 60.0
_GRACE_S = 5.0
_STALE_S = 2.0
_LOOK_S = 0.25
_MOVING_LOOK_S = 2.0
_OLD_S = 24 * 3600.0
_OURS = re.compile(r"\.?[^/]*-(\d{1,10})\.[a-z]+(\.\d{1,10})?")
_NO_COUNTERS = (0,) * len(Counter)


class Ring:
    """One rank of this node: its ring, its process, and what both show.

    Attributes
    ----------
    path, reader, header
        Its file.
    process
        None if there is no such process in this space of process numbers.
    counters
        As last read, by `Counter`.
    moved
        When a counter other than the heartbeats was last seen to move, monotonic seconds.
    alive, exit_code, died
        Whether it runs; how and when (monotonic seconds) it was seen to have ended.
    state
        The kernel's letter, empty if unknown; ``R`` also for one that does something, though it
        sleeps or waits for a disk at the moment.
    answers
        1 if the process's threads run though Python does not (one holds the GIL), 0 if none
        of them does, -1 if Python runs or it is unknown. Of one that has ended, 1 if a signal ended
        it while its launcher had asked no other one to end.
    """

    def __init__(self, path: Path, inode: int, now: float) -> None:
        self.path = path
        self.inode = inode
        self.reader = RingReader(path)
        try:
            self.header = self.reader.header()
            self.process = Process.find(self.header.pid, self.header.birth)
        except BaseException:
            self.reader.close()
            raise
        self.counters = _NO_COUNTERS
        self.seen = self.moved = now
        self.alive = True
        self.exit_code: int | None = None
        self.died = 0.0
        self.state = ""
        self.answers = -1
        self._beat = (0, now)
        self._beats = 0
        self._looked = -math.inf
        self._turns: tuple[float, int] | None = None
        self._doing = Doing()

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.header.rank

    @property
    def recorder(self) -> RecorderState:
        """The state of its recorder."""
        state = self.counters[Counter.STATE]
        return RecorderState(state) if 0 <= state <= max(RecorderState) else RecorderState.ASIDE

    def close(self) -> None:
        """Close its files."""
        self.reader.close()
        if self.process is not None:
            self.process.close()

    def glance(self, now: float) -> bool:
        """Read the counters; return whether the rank has moved. Errors as of `RingReader`."""
        before, self.counters = self.counters, self.reader.counters()
        if self.counters[Counter.HEARTBEAT] != self._beat[0]:
            self._beat = (self.counters[Counter.HEARTBEAT], now)
            self._beats += 1
        # The first two counters are the heartbeats.
        if self.counters[Counter.PHASE :] == before[Counter.PHASE :]:
            return False
        self.moved = now
        return True

    def look(self, now: float, *, runs: bool | None = None) -> bool:
        """Look at the process; return whether it was found to have ended just now.

        Parameters
        ----------
        now
            Monotonic seconds.
        runs
            What the caller knows of it from its pidfd; None if nothing.
        """
        if not self.alive:
            # Its parent may have collected it since, and only now the kernel shows how it ended.
            if self.exit_code is None and self.process is not None:
                self.exit_code = self.process.exit_code()
            return False
        if self.process is None:
            return self._look_elsewhere(now)
        if not (self.process.runs() if runs is None else runs):
            self._end(now, self.process.exit_code())
            return True
        # The state of a rank that moves says nothing, and costs the kernel a sum over its threads.
        if now - self._looked >= (_LOOK_S if now - self.moved > _LOOK_S else _MOVING_LOOK_S):
            self._looked = now
            self.state = self._state(self.process, now)
            self.answers = self._thaw(now)
        return False

    @property
    def starved_s(self) -> float:
        """For how long it has waited for a CPU since it moved, in seconds."""
        return self._doing.starved_s

    def _state(self, process: Process, now: float) -> str:
        """Return the kernel's letter, or ``R`` for a rank that stands still and does something."""
        state = process.state()
        if now - self.moved <= _LOOK_S or state in ("T", "t", "Z", "X", "x"):
            self._doing.forget()
            return state
        busy = self._doing.look(process, self.counters[Counter.INTERPRETED], now)
        return "R" if busy else state

    def _look_elsewhere(self, now: float) -> bool:
        """Judge a process that we cannot see by its heartbeat alone.

        It ended before we looked, or lives in another space of process numbers: then its heart
        beats once more.
        """
        silent = now - self._beat[1]
        if (self._beats < 2 and now - self.seen > _PROOF_S) or silent > _SILENT_S:
            self._end(now, None)
            return True
        return False

    def _end(self, now: float, code: int | None) -> None:
        self.alive, self.died, self.exit_code = False, now, code
        self.state, self.answers = "", -1

    def _thaw(self, now: float) -> int:
        """Return whether a process without heartbeat has its GIL held (1) or is frozen (0).

        Python's thread of the heartbeat wakes every few milliseconds while it waits for the GIL,
        which the kernel counts; in a frozen process no thread wakes.
        """
        process = self.process
        if process is None or now - self._beat[1] < _STALE_S or self._beats == 0:
            self._turns = None
            return -1
        before, turns = self._turns, process.turns()
        if before is None:
            self._turns = (now, turns)
            return -1
        if now - before[0] < 2 * _LOOK_S:
            return self.answers
        self._turns = (now, turns)
        return int(turns > before[1])


class Rings:
    """All rings below a folder that belong to a job: one a rank, that of its newest life.

    Parameters
    ----------
    folder
        Where ranks put them; need not exist yet.
    job
        Job of the rings that are wanted, as the ranks state it; None takes all.
    node
        Node of the ranks that are wanted, likewise.
    """

    def __init__(self, folder: Path, job: str | None = None, node: str | None = None) -> None:
        self.folder = folder
        self.ranks: dict[int, Ring] = {}
        self._job = None if job is None else job.encode()[:64].decode(errors="ignore")
        self._node = node
        self._began = time.time_ns()
        self._bad: dict[str, int] = {}
        self._passed: dict[str, int] = {}
        self._scanned = (0, 0.0)
        self._logged: set[str] = set()

    @property
    def bad(self) -> int:
        """Files that look like rings and cannot be read."""
        return len(self._bad)

    def close(self) -> None:
        """Close all files."""
        for ring in self.ranks.values():
            ring.close()
        self.ranks.clear()

    def refresh(self, now: float) -> list[Ring]:
        """Open what is new in the folder and let go of what is over; return what was opened."""
        try:
            changed = os.stat(self.folder).st_mtime_ns
        except OSError:  # not there yet, or not any more: what is open can still be read
            return []
        if changed == self._scanned[0] and now - self._scanned[1] < _SCAN_S:
            return []
        self._scanned = (changed, now)
        found = self._files()
        self._bad = {name: inode for name, inode in self._bad.items() if found.get(name) == inode}
        self._passed = {n: i for n, i in self._passed.items() if found.get(n) == i}
        known = {ring.path.name: ring.inode for ring in self.ranks.values()}
        opened = []
        for name, inode in found.items():
            if inode not in (known.get(name), self._bad.get(name), self._passed.get(name)):
                ring = self._open(name, inode, now)
                opened += [ring] if ring is not None else []
        self._drop_over()
        return [ring for ring in opened if self.ranks.get(ring.rank) is ring]

    def _files(self) -> dict[str, int]:
        """Return our rings in the folder and their inodes."""
        found: dict[str, int] = {}
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if len(found) >= _MOST_FILES:
                    self._tell("too many files: some are not followed", str(_MOST_FILES))
                    break
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                    with suppress(OSError):
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                            found[entry.name] = info.st_ino
        return found

    def _open(self, name: str, inode: int, now: float) -> Ring | None:
        ring = None
        try:
            ring = Ring(self.folder / name, inode, now)
            ring.glance(now)
        except CkptdError as error:
            if ring is not None:
                ring.close()
            self._bad[name] = inode
            self._tell(f"a ring cannot be read: {error.message}", name)
            return None
        if self._is_wanted(ring):
            self._drop_earlier(ring.header)
            before = self.ranks.get(ring.rank)
            if before is not None:
                before.close()
            self.ranks[ring.rank] = ring
            return ring
        ring.close()
        self._passed[name] = inode
        return None

    def _is_wanted(self, ring: Ring) -> bool:
        header = ring.header
        if self._job not in (None, header.job) or self._node not in (None, header.node):
            return False
        # An end before this watch began is not reported by it.
        if ring.process is None and header.started_ns < self._began and not _beats(ring):
            return False
        before = self.ranks.get(ring.rank)
        return before is None or before.header.started_ns <= header.started_ns

    def _drop_earlier(self, new: RingHeader) -> None:
        """Drop the ring of the same process in an earlier generation."""
        for rank, ring in list(self.ranks.items()):
            old = ring.header
            same = (old.pid, old.birth, old.node) == (new.pid, new.birth, new.node)
            if same and old.generation < new.generation:
                self.drop(rank)

    def _drop_over(self) -> None:
        """Drop dead ranks of lives that are over: another has begun since."""
        if not self.ranks:
            return
        newest = max(self.ranks.values(), key=lambda ring: ring.header.started_ns)
        life = (newest.header.generation, newest.header.world)
        for rank, ring in list(self.ranks.items()):
            other = (ring.header.generation, ring.header.world) != life
            if not ring.alive and (other or newest.seen > ring.died + _GRACE_S):
                self.drop(rank)

    def drop(self, rank: int) -> None:
        """Drop a rank, and do not take its file again."""
        ring = self.ranks.pop(rank)
        self._passed[ring.path.name] = ring.inode
        ring.close()

    def spoiled(self, ring: Ring, error: CkptdError) -> None:
        """Drop a ring that cannot be read any more, and say so once."""
        if self.ranks.get(ring.rank) is ring:
            del self.ranks[ring.rank]
        self._bad[ring.path.name] = ring.inode
        ring.close()
        self._tell(f"a ring cannot be read any more: {error.message}", ring.path.name)

    def _tell(self, what: str, name: str) -> None:
        if name not in self._logged and len(self._logged) < _MOST_FILES:
            self._logged.add(name)
            _log.warning("%s: %s", self.folder / name, what)

    # --- old files ------------------------------------------------------------------------------

    def clean(self, older_than_s: float = _OLD_S) -> list[Path]:
        """Remove what processes left that ended more than `older_than_s` ago; return what."""
        followed = {ring.path.name for ring in self.ranks.values() if ring.alive}
        removed = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                match = _OURS.fullmatch(entry.name)
                if match and entry.name not in followed and self._is_old(entry, older_than_s):
                    pid = int(match[2][1:] if match[2] else match[1])
                    if not self._may_live(Path(entry.path), pid, older_than_s):
                        with suppress(OSError):
                            os.unlink(entry.path)
                            removed.append(Path(entry.path))
        return removed

    def _is_old(self, entry: os.DirEntry[str], older_than_s: float) -> bool:
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            return False
        mine = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
        return mine and time.time() - info.st_mtime >= older_than_s

    def _may_live(self, path: Path, pid: int, older_than_s: float) -> bool:
        """Return whether its process runs, or has in the last `older_than_s`."""
        birth = 0
        with suppress(CkptdError), RingReader(path.with_suffix(_SUFFIX)) as reader:
            birth = reader.header().birth
            beat = reader.counters()[Counter.HEARTBEAT] * 1e-9
            # In another space of numbers, perhaps.
            if beat > 0 and 0 <= time.monotonic() - beat < older_than_s:
                return True
        process = Process.find(pid, birth)
        if process is None:
            return False
        with suppress(OSError):
            process.close()
        return True


def _beats(ring: Ring) -> bool:
    """Return whether its heart has beaten just now, so that it may live where we cannot see it."""
    beat = ring.counters[Counter.HEARTBEAT] * 1e-9
    return beat > 0 and 0 <= time.monotonic() - beat < _STALE_S
