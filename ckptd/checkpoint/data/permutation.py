"""Shuffle of samples: a seeded permutation that needs no memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ckptd.errors import UsageError

MOST = 1 << 62
"""Largest size."""

_ROUNDS = 8
_U = np.uint64
_Ints = np.ndarray[Any, np.dtype[np.int64]]


class Permutation:
    """A pseudo-random permutation of ``range(size)``.

    Every element is computed by itself, in constant time, so that any rank can find any sample's
    place without a list of all of them. It is a Feistel network over the residues of two numbers
    whose product is the size or a little more, and walks on from places outside of the size (Black
    and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). It mixes well and keeps no
    secret: it is no cipher. The values for a given size and key never change between versions.

    Parameters
    ----------
    size
        From 1 to `MOST`.
    key
        Any integers, such as a seed and an epoch: other numbers, another permutation.

    Raises
    ------
    UsageError
        The size is out of range.
    """

    def __init__(self, size: int, *key: int) -> None:
        if not 1 <= size <= MOST:
            raise UsageError(
                "a permutation cannot have this size", wanted=f"from 1 to {MOST}", found=str(size)
            )
        self.size = size
        self._left = math.isqrt(size - 1) + 1  # rounded up
        self._right = -(-size // self._left)
        self._keys = _round_keys(size, key)

    def __getitem__(self, places: _Ints | range) -> _Ints:
        """Return the elements at `places`, int64 of the same shape.

        Raises
        ------
        UsageError
            A place is not below the size.
        """
        wanted = np.asarray(places, np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self.size):
            raise UsageError(
                "index out of range of the permutation",
                wanted=f"from 0 to {self.size - 1}",
                found=f"{wanted.min()} to {wanted.max()}",
            )
        out = self._once(wanted)
        # At most one row of the square lies outside, so this ends soon; each place has a cycle of
        # its own that comes back inside.
        while (outside := out >= self.size).any():
            out[outside] = self._once(out[outside])
        return out

    def _once(self, places: _Ints) -> _Ints:
        left, right = np.divmod(places.astype(_U), _U(self._right))
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mixed(left, key) % _U(self._right)) % _U(self._right)
            else:
                left = (left + _mixed(right, key) % _U(self._left)) % _U(self._left)
        return (left * _U(self._right) + right).astype(np.int64)


def _round_keys(size: int, key: tuple[int, ...]) -> list[np.uint64]:
    state = _word(size)
    for number in key:
        # Length and sign first: no two keys may spell the same words.
        state = _step(state ^ (number.bit_length() << 1 | (number < 0)))
        for shift in range(0, number.bit_length(), 64):
            state = _step(state ^ _word(number >> shift))
    keys = []
    for _ in range(_ROUNDS):
        state = _step(state)
        keys.append(_U(state))
    return keys


def _word(number: int) -> int:
    return number & 0xFFFF_FFFF_FFFF_FFFF


def _step(state: int) -> int:
    """Return the next state and output of splitmix64 (Steele and others, OOPSLA 2014), as one."""
    return int(_mixed(np.array([state], _U), _U(0x9E37_79B9_7F4A_7C15))[0])


def _mixed(values: np.ndarray[Any, np.dtype[np.uint64]], key: np.uint64) -> Any:
    with np.errstate(over="ignore"):
        z = values * _U(0xD6E8_FEB8_6659_FD93) + key
        z = (z ^ (z >> _U(30))) * _U(0xBF58_476D_1CE4_E5B9)
        z = (z ^ (z >> _U(27))) * _U(0x94D0_49BB_1331_11EB)
        return z ^ (z >> _U(31))
