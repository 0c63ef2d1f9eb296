"""Names: keys below a root, chunks in a file, tensors of a state (wrappers left out, escapes).

In it: the largest step, generation and rank; the longest name; tags that are no names.

Spec sections 2 (root), 4.1 (chunk names) and 6 (canonical names).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache

import msgspec

from ckptd.base.grids.grid import Piece
from ckptd.errors import CorruptError, UsageError

MAX_STEP = 10**12 - 1
MAX_GENERATION = 10**8 - 1
MAX_RANK = 10**8 - 1
MAX_NAME_CHARS = 4096

ROOT_MARKER = "ckptd.json"
COMMITS = "commits/"
GENERATIONS = "generations/"
DATA = "data/"
PINS = "pins/"
LEASES = "leases/"
ANNOTATIONS = "annotations/"
PARTS = "parts/"
MARKS = "deleting/"
WITNESS = "witness"

# [0-9] and not \d, which takes the digits of every script.
_COMMIT = re.compile(r"([0-9]{12})-g([0-9]{8})\.json")
_ANNOTATION = re.compile(r"([0-9]{12})-g([0-9]{8})-([0-9]{8})\.json")
_GENERATION = re.compile(r"([0-9]{8})\.json")
_ATTEMPT = re.compile(r"[a-z0-9]{1,32}")
_TAG = re.compile(r"(?!latest\.json)([A-Za-z][A-Za-z0-9._-]{0,63})\.json")
_FOLDER = re.compile(r"([0-9]{12})-g([0-9]{8})-([a-z0-9]{1,32})/?")
_RANK_FILE = re.compile(r"r([0-9]{5,8})\.safetensors")
_DATA_PATH = re.compile(
    r"data/[0-9]{12}-g[0-9]{8}-[a-z0-9]{1,32}/[A-Za-z0-9._=+@,%-]{1,200}\.safetensors"
)


class CommitName(msgspec.Struct, frozen=True, order=True):
    """Identity of a checkpoint: `step`, and the `generation` that wrote it."""

    step: int
    generation: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"

    @property
    def stem(self) -> str:
        """The name in the root, without folder and suffix."""
        return f"{self.step:012d}-g{self.generation:08d}"


def check_step(step: int, most: int = MAX_STEP) -> int:
    """Return `step` as an int up to `most`, which can be named; raise `UsageError` otherwise.

    Integers of other types (numpy's, tensors of one integer) are steps as well; truth is none.
    """
    given = step
    if type(step) is not int and not isinstance(step, bool):
        with suppress(TypeError, RuntimeError, ValueError):
            step = operator.index(step)
    if type(step) is not int or not 0 <= step <= most:
        raise UsageError("invalid step", wanted=f"an int in [0, {most}]", found=repr(given))
    return step


def commit_key(name: CommitName) -> str:
    """Key of a commit record."""
    return f"{COMMITS}{name.stem}.json"


def pin_key(name: CommitName) -> str:
    """Key of a pin."""
    return f"{PINS}{name.stem}.json"


def tag_key(tag: str) -> str:
    """Key of a tag: of a pin whose name is a word; `UsageError` where it can be none."""
    if parse_tag_name(f"{tag}.json") is None:
        raise UsageError(
            "not a name for a checkpoint",
            wanted="a letter, then at most 63 letters, digits, dots, - and _; not latest",
            found=repr(tag)[:100],
        )
    return f"{PINS}{tag}.json"


def annotation_key(name: CommitName, number: int) -> str:
    """Key of the `number`-th annotation of a checkpoint, from 1."""
    return f"{ANNOTATIONS}{name.stem}-{number:08d}.json"


def lease_key(lease_id: str) -> str:
    """Key of a lease."""
    return f"{LEASES}{lease_id}.json"


def generation_key(generation: int) -> str:
    """Key of a generation record."""
    return f"{GENERATIONS}{generation:08d}.json"


def data_folder(name: CommitName, attempt: str) -> str:
    """Folder of one attempt to write a checkpoint; ends in "/"."""
    return f"{DATA}{name.stem}-{attempt}/"


def file_key(folder: str, rank: int) -> str:
    """Key of the data file of `rank`."""
    return f"{folder}r{rank:05d}.safetensors"


def digests_key(data_key: str) -> str:
    """Key of the digest index that belongs to a data file."""
    return data_key.removesuffix(".safetensors") + ".digests"


def rank_of_file(key: str, folder: str) -> int | None:
    """Return whose data file `key` is in `folder`; None when it is something else."""
    match = _RANK_FILE.fullmatch(key[len(folder) :]) if key.startswith(folder) else None
    return int(match[1]) if match else None


def part_key(folder: str, rank: int) -> str:
    """Key of what `rank` reported."""
    return f"{folder}{PARTS}r{rank:05d}"


def parse_commit_name(name: str) -> CommitName | None:
    """Parse the last segment of a commit or pin key; None when it is something else."""
    m = _COMMIT.fullmatch(name)
    return CommitName(int(m[1]), int(m[2])) if m else None


def parse_tag_name(name: str) -> str | None:
    """Parse the last segment of a tag's key; None when it is something else."""
    m = _TAG.fullmatch(name)
    return m[1] if m else None


def parse_annotation_name(name: str) -> tuple[CommitName, int] | None:
    """Parse the last segment of an annotation's key into checkpoint and number, or return None."""
    m = _ANNOTATION.fullmatch(name)
    return (CommitName(int(m[1]), int(m[2])), int(m[3])) if m else None


def parse_generation_name(name: str) -> int | None:
    """Parse the last segment of a generation key; None when it is something else."""
    m = _GENERATION.fullmatch(name)
    return int(m[1]) if m else None


def parse_data_folder(name: str) -> tuple[CommitName, str] | None:
    """Parse the last segment of a data folder into checkpoint and attempt, or return None."""
    m = _FOLDER.fullmatch(name)
    return (CommitName(int(m[1]), int(m[2])), m[3]) if m else None


def attempt_name(number: int, claim_id: str) -> str:
    """Return the name of a life's `number`-th attempt.

    With the claim in it: where a root was made again at one place, the old life counts its
    generations and attempts as the new one does, and must not write into its folders.
    """
    return f"{number:04d}{claim_id[:8]}"


def is_attempt(attempt: str) -> bool:
    """Tell whether `attempt` may be part of a data folder's name."""
    return _ATTEMPT.fullmatch(attempt) is not None


def is_data_folder(folder: str) -> bool:
    """Tell whether `folder` is the key of a data folder, with its "/"."""
    name = folder.removeprefix(DATA)
    return name != folder and name[-1:] == "/" and parse_data_folder(name) is not None


def is_data_path(path: str) -> bool:
    """Tell whether `path` may be a data file of a manifest: directly in a data folder."""
    return _DATA_PATH.fullmatch(path) is not None


# --- values inside a state -----------------------------------------------------------------------

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Segments that torch.compile, activation checkpointing and FSDP put into names of modules."""
_ESCAPED = re.compile(r"(?:%[0-9A-F]{2})+")
_CHUNK_PLACE = re.compile(r"r([0-9]+)|((?:[0-9]+(?:,[0-9]+)*)?)(?::([0-9]+))?")
_INTEGER = re.compile(r"-?[0-9]+")


def canonical_fqn(fqn: str) -> str:
    """Remove the segments that wrappers (compile, activation checkpointing, FSDP1) put in.

    ``module.`` of DDP is a legal attribute name, so it is removed by the code that sees the wrapper
    object itself, not here.
    """
    segments = fqn.split(".")
    if WRAPPERS.isdisjoint(segments):
        return fqn
    return ".".join(s for s in segments if s not in WRAPPERS)


def escape_fqn(fqn: str) -> str:
    """Return the name of a state dict's key: dots stay, and `unescape_fqn` gives it back.

    Escaped are "%", "/" and what is not printable, so that any key makes a legal name.
    """
    if fqn.isprintable() and "%" not in fqn and "/" not in fqn:
        return fqn  # nearly all are, and a save asks for thousands
    return "".join(_quote(c) if c in "%/" or not c.isprintable() else c for c in fqn)


def unescape_fqn(name: str) -> str:
    """Invert `escape_fqn`.

    Raises
    ------
    CorruptError
        `escape_fqn` never gives this.
    """
    return _unescaped(name, escape_fqn)


@lru_cache(4096, typed=True)
def escape_key(key: str | int) -> str:
    """Return one segment for a dict key or list index; `unescape_key` gives it back.

    Strings that look like an integer have their first character escaped, so that ``{"0": ...}``
    and ``{0: ...}`` stay apart.

    Raises
    ------
    UsageError
        kind ``unsavable``: the key is neither a string nor an integer.
    """
    if type(key) is int:
        return str(key)
    if not isinstance(key, str):
        raise UsageError(
            "a key of this type cannot be part of a name",
            kind="unsavable",
            wanted="str or int",
            found=repr(key)[:80],
        )
    if type(key) is str and key.isidentifier():
        return key  # nearly all are
    if key == "":
        return "%"
    if _INTEGER.fullmatch(key):
        return _quote(key[0]) + key[1:]
    return escape_fqn(key).replace(".", "%2E")


def unescape_key(segment: str) -> str | int:
    """Invert `escape_key`.

    Raises
    ------
    CorruptError
        `escape_key` never gives this.
    """
    if segment.isidentifier():
        return segment
    if segment == "%":
        return ""
    if _INTEGER.fullmatch(segment) and str(int(segment)) == segment:
        return int(segment)
    return _unescaped(segment, escape_key)


def _quote(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _unquote(text: str) -> str:
    """Undo `_quote` wherever it was applied; UnicodeDecodeError when that makes no text."""
    return _ESCAPED.sub(
        lambda m: bytes.fromhex(m[0].replace("%", "")).decode("utf-8", "surrogatepass"), text
    )


def _unescaped(text: str, escape: Callable[[str], str]) -> str:
    """Undo `escape`; one name for one key, so what is escaped otherwise is refused."""
    try:
        found = _unquote(text)
    except UnicodeDecodeError:
        found = ""
    if not found or escape(found) != text:
        raise CorruptError("invalid escape in a name", where=text[:200])
    return found


def join(*segments: str) -> str:
    """Join name segments that are escaped already, leaving out empty ones."""
    return ".".join(s for s in segments if s)


# --- chunks inside a file ------------------------------------------------------------------------


def whole_name(tensor: str) -> str:
    """Name of a chunk that is a whole tensor: the tensor's own, escaped where it would mislead."""
    text = tensor.replace("%", "%25").replace("@", "%40")
    return "%5F" + text[1:] if text == "__metadata__" else text


def chunk_name(tensor: str, piece: Piece, shape: tuple[int, ...]) -> str:
    """Name of a chunk inside its safetensors file (spec 4.1).

    The plain tensor name when the chunk is the whole tensor; ``name@o0,o1`` for a cell at that
    offset; ``name@o0,o1:start`` for a flat range that begins at element `start` of that cell.
    """
    base = whole_name(tensor)
    if piece.flat is None and piece.box.shape == shape:
        return base
    offset = ",".join(map(str, piece.box.offset))
    return f"{base}@{offset}" if piece.flat is None else f"{base}@{offset}:{piece.flat[0]}"


def ranked_chunk_name(tensor: str, rank: int) -> str:
    """Name of the chunk that holds `rank`'s value of a per-rank object: ``name@r3``.

    A rank names its chunk before it knows how long the other ranks' values are, so the offset
    cannot be part of the name.
    """
    return f"{whole_name(tensor)}@r{rank}"


def parse_chunk_name(name: str) -> tuple[str, tuple[int, ...] | None, int | None]:
    """Return ``(tensor, offset or None, flat start or None)``; invert `chunk_name`.

    For `ranked_chunk_name` the offset is ``(rank,)`` and the flat start is -1.

    Raises
    ------
    CorruptError
        This is no chunk's name.
    """
    base, at, rest = name.partition("@")
    m = _CHUNK_PLACE.fullmatch(rest)
    try:
        tensor = _unquote(base)
        if tensor and not at:
            return tensor, None, None
        if tensor and m is not None and m[1]:
            return tensor, (int(m[1]),), -1
        if tensor and at and m is not None:
            offset = tuple(map(int, m[2].split(","))) if m[2] else ()
            return tensor, offset, int(m[3]) if m[3] else None
    except ValueError:
        pass
    raise CorruptError("invalid chunk name", where=name[:200])


def are_names(names: Collection[str]) -> bool:
    """Tell whether `check_name` takes all names; much faster."""
    short = max(map(len, names), default=0) <= MAX_NAME_CHARS
    return short and all(names) and all(map(str.isprintable, names))


def check_name(name: str, where: str) -> str:
    """Return a tensor or object name from a file when it is legal, else raise `CorruptError`."""
    if not are_names([name]):
        raise CorruptError(
            "invalid name",
            where=where,
            wanted=f"1 to {MAX_NAME_CHARS} printable characters",
            found=repr(name[:80]),
        )
    return name
