"""Text that every machine has, and which samples of it each step trains on.

The text is the Python standard library's own source. The position in the data is one integer over
a permutation keyed by seed and epoch, so that the samples of a step depend on nothing else: not on
how many ranks there are, nor on how often the job was restarted.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ckptd.errors import NotFoundError, UsageError

__all__ = ["Corpus", "SampleOrder", "read_corpus"]

CORPUS_BYTES = 4 << 20
# Not everywhere installed, and not the library's own code.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as bytes.

    Attributes
    ----------
    tokens
        uint8, shape ``(bytes,)``; a token is a byte.
    digest
        SHA-256 of `tokens`, hexadecimal. A run that resumes compares it: another Python has another
        standard library, and its samples would be others.
    files
        How many files were joined.
    """

    tokens: npt.NDArray[np.uint8]
    digest: str
    files: int

    def windows(self, seq: int) -> int:
        """Return how many samples of `seq` inputs and `seq` targets there are."""
        return (len(self.tokens) - 1) // seq

    def sample(self, index: int, seq: int) -> npt.NDArray[np.int64]:
        """Return sample `index`: ``seq + 1`` tokens, of which neighbours are input and target."""
        start = index * seq
        return self.tokens[start : start + seq + 1].astype(np.int64)


def read_corpus(folder: Path | None = None, limit_bytes: int = CORPUS_BYTES) -> Corpus:
    """Join Python sources in the order of their names, up to `limit_bytes`.

    Parameters
    ----------
    folder
        Where to look; by default the standard library of this Python.

    Raises
    ------
    NotFoundError
        No sources: some distributions ship the standard library compiled or zipped only.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in _sources(folder):
        if size >= limit_bytes:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    text = b"".join(parts)[:limit_bytes]
    if not text:
        raise NotFoundError(
            "no Python sources to train on",
            where=str(folder),
            hint="use a Python that ships its standard library as .py files",
        )
    tokens = np.frombuffer(text, dtype=np.uint8)
    return Corpus(tokens, hashlib.sha256(text).hexdigest(), len(parts))


def _sources(folder: Path) -> list[Path]:
    found: list[Path] = []
    for where, folders, names in os.walk(folder):
        # What is left out may have ten times as many files.
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        found += [Path(where, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


class SampleOrder:
    """The order of all samples, for ever: epoch after epoch, each shuffled in another way.

    Parameters
    ----------
    samples
        Samples in an epoch.
    seed
        Key of the permutations, with the epoch.
    """

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise UsageError("no samples", wanted="a corpus longer than one sample", found=samples)
        self._samples = samples
        self._seed = seed
        self._permutations: dict[int, npt.NDArray[np.int64]] = {}

    def ids(self, position: int, count: int) -> list[int]:
        """Return the indices of the samples at `position` and the ``count - 1`` after it."""
        return [self._id(p) for p in range(position, position + count)]

    def _id(self, position: int) -> int:
        epoch, offset = divmod(position, self._samples)
        if epoch not in self._permutations:
            bits = np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64))
            # One epoch is kept: positions only grow.
            self._permutations = {epoch: np.random.Generator(bits).permutation(self._samples)}
        return int(self._permutations[epoch][offset])
