from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ckptd.elastic import keyed_generator, keyed_rng, keyed_seed


def _draw() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_a_key_gives_the_same_numbers_wherever_it_is_used() -> None:
    with keyed_rng(1, "dropout", 7):
        first = _draw()
    _draw()
    with keyed_rng(1, "dropout", 7):
        assert _draw() == first


def test_any_other_key_gives_others() -> None:
    keys = [(1,), (2,), (1, 0), (0, 1), ("1",), (-1,), (1 << 64,), ("a", 1), ("a1",)]
    assert len({keyed_seed(*key) for key in keys}) == len(keys)
    assert all(0 <= keyed_seed(*key) < 1 << 63 for key in keys)


def test_the_streams_before_go_on_after_also_after_an_error() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = [_draw(), _draw()]
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    got = [_draw()]
    with pytest.raises(RuntimeError, match="inside"), keyed_rng(4):
        _draw()
        raise RuntimeError("inside")
    assert [*got, _draw()] == expected


def test_seeds_never_change_between_versions() -> None:
    # A job that resumes with a newer ckptd must draw the same numbers.
    assert keyed_seed(1, "dropout", 2) == GOLDEN


def test_a_generator_belongs_to_its_key() -> None:
    a, b = (torch.rand(3, generator=keyed_generator(5, k)) for k in (1, 1))
    assert a.tolist() == b.tolist()
    assert a.tolist() != torch.rand(3, generator=keyed_generator(5, 2)).tolist()


GOLDEN = 1131316167787120385
