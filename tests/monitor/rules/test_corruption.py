"""Checksums that notice an exchange, replicas that differ, gradients out of line."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.monitor.rules.corruption import CHUNK, checksum, norm_outliers, replica_differences
from tests.monitor import jobs

A = np.arange(6, dtype="<f4")


def test_the_order_of_tensors_does_not_matter_and_their_names_do() -> None:
    b = A + 1
    assert checksum([("a", A), ("b", b)]) == checksum([("b", b), ("a", A)])
    assert checksum([("a", A), ("b", b)]) != checksum([("a", b), ("b", A)])
    assert checksum([("a", A)]) != checksum([("a", A)], salt=1)
    assert checksum([("a", A[:0])]) != checksum([])


@given(st.permutations(range(6)))
def test_values_that_change_places_are_noticed(order: list[int]) -> None:
    same = order == sorted(order)
    assert (checksum([("a", A[order])]) == checksum([("a", A)])) is same


def test_chunks_that_change_places_are_noticed() -> None:
    one, two = bytes(CHUNK), b"\1" * CHUNK
    assert checksum([("a", one + two)]) != checksum([("a", two + one)])


def test_every_bit_counts() -> None:
    data = bytearray(3 * CHUNK // 2)
    good = checksum([("w", data)])
    for at in (0, CHUNK - 1, CHUNK, len(data) - 1):
        data[at] ^= 1
        assert checksum([("w", data)]) != good
        data[at] ^= 1
    assert checksum([("w", data)]) == good


def test_the_minority_of_replicas_is_named() -> None:
    sets, ranks = [0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]
    assert not list(replica_differences(sets, ranks, [9, 8, 9, 8, 9, 8], 7))
    got = jobs.told(replica_differences(sets, ranks, [9, 8, 9, 2**64 - 1, 9, 8], 7))
    assert got == [("silent corruption", ["3"])]
    assert not list(replica_differences([], [], [], 7))


@pytest.mark.parametrize("sums", [[1, 2], [1, 1, 2, 2], [1, 2, 3]])
def test_without_a_majority_it_is_to_be_computed_again(sums: list[int]) -> None:
    (verdict,) = replica_differences([0] * len(sums), list(range(len(sums))), sums, 7)
    assert len(verdict.suspects) == len(sums)
    assert max(s.confidence for s in verdict.suspects) <= 0.5
    assert "again" in verdict.evidence[1]


def _norms(steps: int = 3) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.exp(0.2 * np.random.default_rng(1).standard_normal((steps, 16)))


@pytest.mark.parametrize("value", [1e6, 1e-6, np.inf, np.nan])
def test_a_gradient_out_of_line_in_each_step(value: float) -> None:
    norms = _norms()
    norms[:, 5] = value
    got = jobs.told(norm_outliers(range(16), norms))  # type: ignore[arg-type]
    assert got == [("silent corruption", ["5"])]


def test_one_hard_batch_is_no_fault() -> None:
    norms = _norms()
    norms[1, 5] = 1e6
    assert not list(norm_outliers(np.arange(16), norms))
    assert not list(norm_outliers(np.arange(16), _norms()))


def test_a_model_that_diverges_is_no_fault_of_a_rank() -> None:
    assert not list(norm_outliers(np.arange(16), np.full((3, 16), np.nan)))
    norms = _norms()
    norms[:, :9] = np.inf
    assert not list(norm_outliers(np.arange(16), norms))
