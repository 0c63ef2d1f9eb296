"""Which format a folder or file is of, the order of readers, folders below that are looked into.

In it: how many; errors where several checkpoints are there, or metadata is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

from ckptd.base.runtime.pauses import no_collection
from ckptd.checkpoint.load.foreign import ForeignFormats
from ckptd.errors import CkptdError, MismatchError, first_few
from ckptd.plugins import READERS, entries, load_plugin
from ckptd.readers.base import Foreign, ForeignPiece, FormatReader, Listing, damaged
from ckptd.readers.hf import END, local_pieces
from ckptd.readers.hubcache import follow_cache
from ckptd.readers.megatron import open_buckets
from ckptd.readers.torchfiles import local_tensors
from ckptd.readers.twin import ForeignRoot
from ckptd.store.base import Store

_OWN = (
    "dcp:DcpReader",
    "hf:HfReader",
    "deepspeed:DeepSpeedReader",
    "megatron:MegatronReader",
    "torchfiles:TorchReader",
)
_MOST_FOLDERS = 256
_MOST_NAMED = 6


def readers() -> list[FormatReader]:
    """Return all readers, ckptd's own first; raises as `ckptd.plugins.load_plugin`."""
    found: list[FormatReader] = []
    for target in _OWN:
        module, _, name = target.partition(":")
        found.append(getattr(import_module(f"ckptd.readers.{module}"), name)())
    why = f"every reader of the group {READERS} is asked about a foreign checkpoint"
    return found + [load_plugin(entry, why)() for entry in entries(READERS)]


def format_of(store: Store) -> str:
    """Return the name of a reader that recognises the folder itself; empty where none does."""
    here = Listing(follow_cache(store))
    return next((reader.name for reader in readers() if reader.recognise(here)), "")


def find_foreign(store: Store, only: str = "", step: int = 0) -> ForeignRoot | None:
    """Open the foreign checkpoint in a folder; None where no reader recognises one.

    Looked for in the folder itself, and else in the folders directly below, of which one may hold
    a checkpoint.

    Parameters
    ----------
    store
        The folder.
    only
        A file in it: what else is there is not looked at.
    step
        Of a checkpoint that does not say its own.

    Raises
    ------
    MismatchError
        There are checkpoints of several formats, or in several folders.
    CorruptError, RefusedError
        It is damaged, or of a kind that is not read.
    """
    store = follow_cache(store)
    here = Listing(store, only=[only] if only else ())
    known = readers()
    found = _best(known, here)
    if found is None:
        below = [here.inside(folder) for folder in here.folders[:_MOST_FOLDERS]]
        places = [(reader, names) for names in below if (reader := _best(known, names))]
        if len(places) > 1:
            raise _ambiguous(
                "several checkpoints in one folder",
                here,
                [f"{n.prefix} ({r.name})" for r, n in places],
            )
        if not places:
            return None
        found, here = places[0]
    with _damage(here):
        return ForeignRoot(store, found.open(here), found.name, step, here.seen)


def rank_files(store: Store, files: Sequence[str], step: int) -> ForeignRoot:
    """Open files of ranks, whose tensors are parts that only a layout knows: ``FILE: NAME``.

    Raises
    ------
    CorruptError, RefusedError
        A file is missing or damaged.
    NotFoundError
        There is nothing to convert.
    """
    store = follow_cache(store)
    here = Listing(store)
    with _damage(here):
        pieces: list[ForeignPiece] = []
        left_out: list[str] = []
        for file in files:
            is_safe = file.endswith(END)
            found = local_pieces(here, file) if is_safe else local_tensors(here, file, left_out)
            pieces += (replace(piece, name=f"{file}: {piece.name}") for piece in found)
        foreign = Foreign(pieces, left_out=left_out, has_sections=False)
        return ForeignRoot(store, foreign, "ranks", step, here.seen)


def bucket_root(store: Store, step: int) -> ForeignRoot | None:
    """Open the buckets of an optimizer in a folder; None where there are none.

    They are like files of ranks: `ckptd.readers.megatron.open_buckets` says what they are called.
    """
    store = follow_cache(store)
    here = Listing(store)
    with _damage(here):
        found = open_buckets(here)
        return None if found is None else ForeignRoot(store, found, "buckets", step, here.seen)


@contextmanager
def _damage(names: Listing) -> Iterator[None]:
    """Make errors of metadata that no reader expected the error that they are: a net below all.

    Without collections meanwhile: a large pickle is millions of objects that all live on.
    """
    try:
        with no_collection():
            yield
    except CkptdError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        what = "the metadata of a checkpoint is damaged, or its reader is"
        raise damaged(what, names.where, error) from error


def _best(known: Sequence[FormatReader], names: Listing) -> FormatReader | None:
    scores = [(reader.recognise(names), reader) for reader in known]
    most = max(score for score, _ in scores)
    best = [reader for score, reader in scores if score == most]
    if not most:
        return None
    if len(best) > 1:
        raise _ambiguous(
            "checkpoints of several formats in one folder", names, [r.name for r in best]
        )
    return best[0]


def _ambiguous(what: str, names: Listing, found: Sequence[str]) -> MismatchError:
    return MismatchError(
        what,
        where=names.where,
        wanted="one",
        found=first_few(found, _MOST_NAMED),
        hint="give the path of one checkpoint",
    )


class _Formats:
    """Foreign formats, as the core uses them; see `ckptd.checkpoint.load.foreign`."""

    find = staticmethod(find_foreign)
    format_of = staticmethod(format_of)

    def names(self) -> list[str]:
        return [reader.name for reader in readers()]


FORMATS: ForeignFormats = _Formats()
"""The part ``foreign``."""
