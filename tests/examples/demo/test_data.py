from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptd.errors import NotFoundError, UsageError
from ckptd_demo.data import SampleOrder, read_corpus


def _library(folder: Path) -> Path:
    for name, text in {
        "b.py": "second",
        "a.py": "first ",
        "z/inner.py": " third",
        "site-packages/other.py": "not ours",
        "z/test/case.py": "not ours",
        "notes.txt": "not a source",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_corpus_joins_the_library_in_order_of_names(tmp_path: Path) -> None:
    corpus = read_corpus(_library(tmp_path))
    assert corpus.tokens.tobytes() == b"first second third"
    assert corpus.files == 3


def test_corpus_is_cut_at_its_limit(tmp_path: Path) -> None:
    assert read_corpus(_library(tmp_path), limit_bytes=8).tokens.tobytes() == b"first se"


def test_corpus_digest_tells_texts_apart(tmp_path: Path) -> None:
    before = read_corpus(_library(tmp_path)).digest
    (tmp_path / "a.py").write_text("First ")
    assert read_corpus(tmp_path).digest != before


def test_corpus_of_this_python_is_the_same_twice() -> None:
    assert read_corpus().digest == read_corpus().digest


def test_corpus_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no Python sources"):
        read_corpus(tmp_path)


def test_sample_overlaps_the_next_by_one_token(tmp_path: Path) -> None:
    corpus = read_corpus(_library(tmp_path))
    assert corpus.windows(8) == 2
    first, second = corpus.sample(0, 8), corpus.sample(1, 8)
    assert bytes(first.astype(np.uint8)) == b"first sec"
    assert first[-1] == second[0]


@pytest.mark.parametrize("cuts", [[12], [3, 9], [5, 1, 6]])
def test_order_does_not_depend_on_how_it_is_read(cuts: list[int]) -> None:
    whole = SampleOrder(7, seed=3).ids(4, 12)
    order, position, parts = SampleOrder(7, seed=3), 4, []
    for count in cuts:
        parts += order.ids(position, count)
        position += count
    assert parts == whole


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    order = SampleOrder(50, seed=3)
    first, second = order.ids(0, 50), order.ids(50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_order_depends_on_the_seed() -> None:
    assert SampleOrder(50, seed=3).ids(0, 50) != SampleOrder(50, seed=4).ids(0, 50)


def test_order_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError):
        SampleOrder(0, seed=3)
