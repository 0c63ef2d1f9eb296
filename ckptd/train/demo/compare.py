"""Compare two checkpoints by ``ckptd diff``, as a user would."""

from __future__ import annotations

import msgspec

from ckptd.decoding import json_decoder
from ckptd.train.demo.verbs import run_ckptd

__all__ = ["Comparison", "compare"]

# Random streams are per rank; for another number of ranks a load makes new ones from the saved.
_RESEEDED = frozenset({"rng"})
_EQUAL, _DIFFERENT = 0, 1


class _Tensor(msgspec.Struct):
    name: str
    bit_exact: bool


class _Object(msgspec.Struct):
    name: str


class _Document(msgspec.Struct):
    tensors: list[_Tensor]
    objects: list[_Object]


_documents = json_decoder(_Document)


class Comparison(msgspec.Struct, frozen=True):
    """How many tensors are bit for bit the same, and the names of whatever is not.

    `identical`: nothing at all differs, streams of random numbers included.
    """

    exact: int
    differing: list[str]
    identical: bool


def compare(left: str, right: str, deadline_s: float) -> Comparison:
    """Compare two checkpoints, each named as on the command line.

    Raises
    ------
    CkptdError
        They cannot be compared: one of them is not there, or bad.
    DeadlineError
        It took longer than `deadline_s` seconds.
    """
    done = run_ckptd(["diff", left, right, "--json"], deadline_s, fine=(_EQUAL, _DIFFERENT))
    document = _documents.decode(done.stdout)
    differing = [tensor.name for tensor in document.tensors if not tensor.bit_exact]
    differing += [entry.name for entry in document.objects if entry.name not in _RESEEDED]
    exact = sum(tensor.bit_exact for tensor in document.tensors)
    return Comparison(exact, differing, done.returncode == _EQUAL)
