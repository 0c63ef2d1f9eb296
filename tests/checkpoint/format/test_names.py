from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.grids.grid import Piece
from ckptd.checkpoint.format import names
from ckptd.checkpoint.format.names import CommitName
from ckptd.errors import CkptdError, CorruptError, UsageError
from ckptd.store.base import check_key
from ckptd.types import Box
from tests.base.grids.strategies import cuts, shapes
from tests.checkpoint.format.strategies import fqns

any_text = st.text(st.characters(codec=None, categories=None), max_size=20)
keys = st.one_of(
    any_text, st.integers(), st.sampled_from(["0", "-5", "٣", "", "%", "a.b/c", "--5", "00"])
)


@given(keys)
def test_key_round_trip(key: str | int) -> None:
    segment = names.escape_key(key)
    back = names.unescape_key(segment)
    assert (type(back), back) == (type(key), key)
    assert "." not in segment
    assert "/" not in segment
    names.check_name(segment, "here")


@given(keys, keys)
def test_different_keys_have_different_names(a: str | int, b: str | int) -> None:
    same = type(a) is type(b) and a == b
    assert (names.escape_key(a) == names.escape_key(b)) == same


@given(st.one_of(fqns, any_text.filter(bool)))
def test_fqn_round_trip(fqn: str) -> None:
    name = names.escape_fqn(fqn)
    assert name.count(".") == fqn.count(".")
    if name:
        assert names.unescape_fqn(name) == fqn
        names.check_name(name, "here")


def test_ordinary_names_stay_as_they_are() -> None:
    fqn = "model.layers.0.self_attn.q_proj.weight"
    assert names.escape_fqn(fqn) == fqn
    assert names.escape_key("exp_avg") == "exp_avg"
    assert type(names.escape_key(type("Text", (str,), {})("exp_avg"))) is str
    assert names.escape_key(3) == "3"
    assert names.escape_key("3") == "%33"


@given(st.text("0123456789ABCDEF%-. a", max_size=8))
def test_a_segment_from_a_file_has_one_spelling(segment: str) -> None:
    with suppress(CorruptError):
        assert names.escape_key(names.unescape_key(segment)) == segment


@pytest.mark.parametrize("segment", ["%2e", "%FF", "%2", "%41", "007", "-0", "a.b", "--5%"])
def test_other_spellings_are_refused(segment: str) -> None:
    with pytest.raises(CorruptError):
        names.unescape_key(segment)


@pytest.mark.parametrize("key", [True, 1.5, None, (1,), b"x"])
def test_keys_of_other_types_are_refused(key: object) -> None:
    with pytest.raises(UsageError) as caught:
        names.escape_key(key)  # type: ignore[arg-type]
    assert caught.value.kind == "unsavable"


def test_wrappers_leave_no_trace() -> None:
    fqn = "_orig_mod.layers.0._checkpoint_wrapped_module.w._fsdp_wrapped_module.x"
    assert names.canonical_fqn(fqn) == "layers.0.w.x"
    assert names.canonical_fqn("module.weight") == "module.weight"


# --- chunk names -----------------------------------------------------------------------------


@given(fqns.filter(bool), shapes().flatmap(cuts))
def test_chunk_names_tell_pieces_apart(fqn: str, cut: object) -> None:
    grid = cut.grid  # type: ignore[attr-defined]
    pieces = [grid.piece(i) for i in range(grid.npieces)]
    made = [names.chunk_name(fqn, p, grid.shape) for p in pieces]
    assert len(set(made)) == len(made)
    for piece, name in zip(pieces, made, strict=True):
        tensor, offset, flat = names.parse_chunk_name(name)
        assert tensor == fqn
        whole = piece.flat is None and piece.box.shape == grid.shape
        assert offset == (None if whole else piece.box.offset)
        assert flat == (piece.flat[0] if piece.flat else None)


def test_chunk_names_of_two_tensors_never_meet() -> None:
    cell = Piece(0, Box((3,), (1,)), None)
    assert names.chunk_name("a", cell, (9,)) == "a@3"
    assert names.whole_name("a@3") == "a%403"
    assert names.whole_name("__metadata__") != "__metadata__"
    assert names.parse_chunk_name(names.whole_name("__metadata__"))[0] == "__metadata__"


def test_per_rank_chunks_are_named_by_rank() -> None:
    assert names.ranked_chunk_name("rng", 12) == "rng@r12"
    assert names.parse_chunk_name("rng@r12") == ("rng", (12,), -1)


@given(st.text("@:,r0123456789%ab-+ ٣", max_size=12))
def test_any_text_as_chunk_name(text: str) -> None:
    with suppress(CorruptError):
        tensor, offset, _ = names.parse_chunk_name(text)
        assert tensor
        assert (offset is None) == ("@" not in text)


# --- keys below the root ------------------------------------------------------------------------

commits = st.builds(
    CommitName, st.integers(0, names.MAX_STEP), st.integers(0, names.MAX_GENERATION)
)


@given(
    commits,
    st.from_regex(re.compile(r"[a-z0-9]{1,32}"), fullmatch=True),
    st.integers(0, names.MAX_RANK),
)
def test_keys_round_trip_and_are_legal(commit: CommitName, attempt: str, rank: int) -> None:
    key = names.commit_key(commit)
    assert names.parse_commit_name(check_key(key).removeprefix(names.COMMITS)) == commit
    folder = names.data_folder(commit, attempt)
    assert names.is_data_folder(folder)
    assert names.parse_data_folder(folder.removeprefix(names.DATA)) == (commit, attempt)
    path = check_key(names.file_key(folder, rank))
    assert names.is_data_path(path)
    assert check_key(names.digests_key(path)) != path
    check_key(names.part_key(folder, rank))
    generation = names.generation_key(commit.generation).removeprefix(names.GENERATIONS)
    assert names.parse_generation_name(generation) == commit.generation


@given(commits, commits)
def test_keys_sort_like_steps(a: CommitName, b: CommitName) -> None:
    assert (names.commit_key(a) < names.commit_key(b)) == (a < b)


@pytest.mark.parametrize(
    "name", ["", "1-g1.json", "٣" * 12 + "-g00000001.json", "000000000001-g00000001.json ", "x"]
)
def test_other_names_are_no_commits(name: str) -> None:
    assert names.parse_commit_name(name) is None


FOLDER = "data/000000000012-g00000003-a1/"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "r00000.safetensors",
        "/" + FOLDER + "r00000.safetensors",
        FOLDER + "../r00000.safetensors",
        FOLDER + "parts/r00000.safetensors",
        FOLDER + ".safetensors",
        FOLDER + "r00000.pt",
        FOLDER + "r00000.safetensors\n",
        FOLDER + "r\x00.safetensors",
        FOLDER + "x" * 300 + ".safetensors",
        "data/../commits/x.safetensors",
        "DATA/000000000012-g00000003-a1/r.safetensors",
        "data/000000000012-g00000003-A1/r.safetensors",
        "data\\000000000012-g00000003-a1\\r.safetensors",
        "data/٣00000000012-g00000003-a1/r.safetensors",
    ],
)
def test_paths_of_data_files(path: str) -> None:
    assert names.is_data_path(FOLDER + "r00000.safetensors")
    assert not names.is_data_path(path)


@given(any_text)
def test_any_text_as_path_is_legal_only_if_the_store_takes_it(text: str) -> None:
    for path in (text, FOLDER + text, FOLDER + text + ".safetensors", "data/" + text):
        if names.is_data_path(path):
            check_key(path)
        if names.is_data_folder(path):
            check_key(path[:-1])


@pytest.mark.parametrize(
    "folder",
    [
        FOLDER[:-1],
        FOLDER + "/",
        FOLDER + "x/",
        "data/",
        "data/x/",
        "data//",
        FOLDER.removeprefix("data/"),
        "commits/000000000012-g00000003-a1/",
    ],
)
def test_data_folders(folder: str) -> None:
    assert names.is_data_folder(FOLDER)
    assert not names.is_data_folder(folder)


def test_steps_that_can_be_named() -> None:
    assert [names.check_step(s) for s in (0, 7, names.MAX_STEP)] == [0, 7, 10**12 - 1]


@pytest.mark.parametrize("step", [-1, 10**12, True, 1.0, "5", None])
def test_steps_that_cannot_be_named(step: object) -> None:
    with pytest.raises(UsageError) as caught:
        names.check_step(step)  # type: ignore[arg-type]
    assert "invalid step" in caught.value.message


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00", "x" * 4097, "\ud800", "\u200b"])
def test_illegal_names_in_files(name: str) -> None:
    with pytest.raises(CkptdError) as caught:
        names.check_name(name, "manifest.json")
    assert "invalid name" in caught.value.message
    assert "manifest.json" in str(caught.value)
