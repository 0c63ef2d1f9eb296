"""A process that has imported everything and forks lives: a hundred kills in a minute.

Python with numpy and an S3 client takes seconds to start, a fork takes milliseconds. The zygote
itself never starts a thread, so its forks are clean.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import IO, Self

import msgspec

import ckptd.checkpoint.save.drain as filewriter
import ckptd.store.s3_client as s3_client
from ckptd.base.signatures import need_blake3, read_private
from ckptd.errors import ProcessError
from tests import programs
from tests.checkpoint.crash.boards import FileBoard
from tests.checkpoint.crash.life import SLICE_BYTES, End, Life, live, outcome_key
from tests.offspring import have_them_forked

__all__ = ["Zygote", "warm_up_s3"]

LIMIT_S = 90.0
_decode_lives = msgspec.json.Decoder(list[Life])
_decode_ends = msgspec.json.Decoder(list[End])


class Zygote:
    """Runs lives in processes of their own; close it, or leave its ``with`` block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.crash.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def run(self, *lives: Life) -> list[End]:
        """Run the ranks of one job side by side and return how each ended.

        When one is killed the others hear of it over the board, as from a launcher. A life that
        does not end is an error.
        """
        source, sink = self._pipes()
        sink.write(msgspec.json.encode(lives) + b"\n")
        sink.flush()
        answer = source.readline()
        if not answer:
            raise RuntimeError("the zygote is gone")
        ends = _decode_ends.decode(answer)
        stuck = [i for i, e in enumerate(ends) if e.signal == signal.SIGABRT]
        if stuck:
            raise RuntimeError(f"ranks {stuck} did not end within {LIMIT_S} s")
        return ends

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        return self._process.stdout, self._process.stdin

    def close(self) -> None:
        """End the process."""
        for pipe in self._pipes():
            pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Child:
    def __init__(self, life: Life) -> None:
        self.life = life
        self.end: End | None = None
        self._pipe, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _be(life, theirs)
        os.close(theirs)

    def look(self) -> bool:
        """Tell whether it has ended."""
        if self.end is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.end = self._end(status)
        return self.end is not None

    def _end(self, status: int) -> End:
        raw = os.read(self._pipe, 1 << 16)
        os.close(self._pipe)
        if os.WIFSIGNALED(status):
            return End(signal=os.WTERMSIG(status))
        if os.WEXITSTATUS(status) or not raw:
            return End(error={"class": "CkptdError", "message": f"status {status}: {raw!r}"})
        return msgspec.json.decode(raw, type=End)


def _be(life: Life, pipe: int) -> None:
    """Live in the forked process, which ends here."""
    code = 1
    try:
        if life.elsewhere:
            have_them_forked(programs.live)
        os.write(pipe, msgspec.json.encode(live(life)))
        code = 0
    except BaseException as error:
        os.write(pipe, repr(error).encode()[:1000])
        raise
    finally:
        os._exit(code)


def _run(lives: Sequence[Life]) -> list[End]:
    children = [_Child(life) for life in lives]
    limit = time.monotonic() + LIMIT_S
    told = False
    while any([not c.look() for c in children]):  # noqa: C419 - look at each of them
        killed = [c for c in children if c.end is not None and c.end.signal]
        if killed and not told:
            told = True
            _tell(killed[0].life)
        if time.monotonic() > limit:
            for child in children:
                if not child.look():
                    os.kill(child.pid, signal.SIGABRT)
        time.sleep(0.002)
    return [c.end or End() for c in children]


def _tell(life: Life) -> None:
    """Post what a launcher knows: this rank is dead."""
    if life.board is None:
        return
    board = FileBoard(life.board, life.rank, life.world)
    key = outcome_key(life.step, life.attempt)
    error = ProcessError(f"rank {life.rank} was killed", kind="killed")
    if life.rank == 0:
        if board.peek(key) is None:
            board.set(key, msgspec.json.encode(error.to_dict()))
    else:
        board.set(key + "/failed", error.message.encode())


@cache
def warm_up_s3() -> None:
    """Import and read what every S3 store would at its first call: forks have it then."""
    keys = {"aws_access_key_id": "-", "aws_secret_access_key": "-"}
    s3_client._session(None).create_client("s3", region_name="us-east-1", **keys)


def main() -> None:
    """Serve until standard input ends."""
    filewriter.SLICE_BYTES = SLICE_BYTES
    for line in sys.stdin.buffer:
        lives = _decode_lives.decode(line)
        if any(life.spec.url.startswith("s3:") for life in lives):
            warm_up_s3()
        if any(life.sign for life in lives):
            read_private(lives[0].sign)
            need_blake3()
        gc.freeze()  # see `ckptd.testing.frozen`
        ends = _run(lives)
        sys.stdout.buffer.write(msgspec.json.encode(ends) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
