"""Roots and processes in unusual places: each works, or an error says what to set.

The table in docs/reference/stores.md, "Places that were tried", has a row for each of these.
"""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptd
from ckptd import Checkpointer
from ckptd.errors import CkptdError, UsageError
from ckptd.store import open_store
from tests.cli.running import Cli
from tests.offspring import have_them_forked
from tests.processes import PATIENCE_S
from tests.programs import live, zygote
from tests.store.places import refuse_link
from tests.writing import VARIABLE

_OTHER = 65534  # nobody's number
_CLONE_NEWNS = 0x20000


def save(root: str, step: int = 1, numbers: int = 100_000) -> str:
    """Save a state; returns ``works``, or the error."""
    try:
        with Checkpointer(root, new_run=False) as ck:
            ck.save(step, {"t": torch.full((numbers,), float(step))}).durable(PATIENCE_S)
    except CkptdError as error:
        return f"{type(error).__name__} {error.kind}: {error}"
    return "works"


def load(root: str, step: int = 1, numbers: int = 100_000) -> str:
    """Load the newest state; returns ``works``, or the error, or what came instead."""
    state = {"t": torch.zeros(numbers)}
    try:
        with Checkpointer(root) as ck:
            ck.load(state)
    except CkptdError as error:
        return f"{type(error).__name__} {error.kind}: {error}"
    found = [value.item() for value in state["t"].aminmax()]
    return "works" if found == [float(step)] * 2 else f"wrong values: {found}"


def save_and_load(root: str, numbers: int = 100_000) -> str:
    saved = save(root, numbers=numbers)
    return load(root, numbers=numbers) if saved == "works" else saved


# -- names ---------------------------------------------------------------------------------------

NAMES = {
    "space": "with space",
    "percent": "per%20cent",
    "hash": "a#b",
    "question mark": "what?x=1",
    "unicode": "ünïcode-漢字",
    "newline": "new\nline",
    "escape": "\x1b[31mred",
    "backslash and quotes": "back\\slash 'quo\"te",
    "colon": "a:b",
    "pattern": "[x]*{0}$HOME",
    "leading minus": "-leading",
    "longest": "x" * 255,
    "long path": "/".join(["d" * 250] * 9),
    "trailing slash": "trailing/",
    "two slashes": "a//b",
    "upwards": "a/../up",
    "relative": "./relative",
    "linked": "link",
    "below a link": "link/below",
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "thread")
    root = NAMES[name]
    assert save_and_load(root, 10) == "works"
    verb = f"./{root}" if root.startswith("-") else root
    assert cli.json("ls", verb)["checkpoints"][0]["step"] == 1
    cli.good("verify", verb)


def test_names_that_are_none(tmp_path: Path, cli: Cli) -> None:
    with pytest.raises(UsageError) as caught:
        Checkpointer(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    assert (caught.value.message, caught.value.message) == (
        "a path is not UTF-8",
        "a path is not UTF-8",
    )
    assert "a path is not UTF-8" in cli("ls", os.fsdecode(b"\xff"), "--json").error["message"]
    assert "ENAMETOOLONG" in save(str(tmp_path / ("x" * 256)))
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "is in the way" in save(str(tmp_path / "dangling"))


def test_a_root_without_hard_links_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        assert save(root, 1, 10) == "works"
        monkeypatch.setattr(os, "link", refuse_link)
        assert load(root, 1, 10) == "works"
        said = save(root, 2, 10)
        assert said.startswith("RefusedError no-create-only: this file system has no hard links")
        assert load(root, 1, 10) == "works"


# -- processes -----------------------------------------------------------------------------------


@pytest.fixture
def play() -> Callable[..., list[str]]:
    """Return what a function of this module returned in a process of its own."""

    def run(function: Callable[..., list[str]], *arguments: object) -> list[str]:
        context = zygote()
        ours, theirs = context.Pipe()
        child = context.Process(target=answer, args=(theirs, function, arguments))
        child.start()
        theirs.close()
        try:
            found = ours.recv() if ours.poll(PATIENCE_S) else ["no answer"]
        finally:
            child.kill()
            child.join()
        if found[0].startswith("skip: "):
            pytest.skip(found[0].removeprefix("skip: "))
        return list(found)

    return run


def answer(
    to: multiprocessing.connection.Connection,
    function: Callable[..., list[str]],
    arguments: tuple[object, ...],
) -> None:
    try:
        to.send(function(*arguments))
    except pytest.skip.Exception as skipped:
        to.send([f"skip: {skipped}"])


def limited(root: str, limit: int, most: int) -> list[str]:
    resource.setrlimit(limit, (most, most))
    return [save_and_load(root)]


@pytest.mark.parametrize(("limit", "most"), [("NOFILE", 256), ("MEMLOCK", 0), ("FSIZE", 1 << 20)])
def test_limits_that_suffice(
    limit: str, most: int, tmp_path: Path, play: Callable[..., list[str]]
) -> None:
    number = getattr(resource, f"RLIMIT_{limit}")
    assert play(limited, str(tmp_path / "root"), number, most) == ["works"]


def test_a_limit_of_file_sizes_is_named(tmp_path: Path, play: Callable[..., list[str]]) -> None:
    said = play(limited, str(tmp_path / "root"), resource.RLIMIT_FSIZE, 100_000)[0]
    assert "a limit of this process" in said
    assert "files of 100000 bytes, memory files too: raise `ulimit -f`" in said


def written_until(path: str, limit: int) -> list[str]:
    """Write an object of 1 MB through a store, which the limit forbids."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with open_store(path) as store:
        found = []
        for put in (False, True):
            try:
                if put:
                    store.put("a", bytes(1 << 20))
                else:
                    store.writer("a", 1 << 20).commit()
            except CkptdError as error:
                found.append(str(error))
        return found


def test_a_limit_of_file_sizes_is_no_full_disk(
    tmp_path: Path, play: Callable[..., list[str]]
) -> None:
    said = play(written_until, str(tmp_path / "root"), 100_000)
    assert len(said) == 2
    for text in said:
        assert "no space left" not in text
        assert "the file exceeds a size limit" in text
        assert "raise `ulimit -f`" in text


def with_variables(root: str, variables: dict[str, str | None]) -> list[str]:
    tempfile.tempdir = None
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return [save_and_load(root)]


@pytest.mark.parametrize(
    "variables",
    [
        {"HOME": None},
        {"HOME": "/nonexistent"},
        {"HOME": "/proc/self"},
        {"TMPDIR": "/nonexistent"},
        {"HOME": None, "TMPDIR": None, "USER": None, "LOGNAME": None, "PATH": None},
    ],
    ids=["no HOME", "missing HOME", "HOME not writable", "missing TMPDIR", "none at all"],
)
def test_variables(
    variables: dict[str, str | None], tmp_path: Path, play: Callable[..., list[str]]
) -> None:
    assert play(with_variables, str(tmp_path / "root"), variables) == ["works"]


def fork_from_now_on() -> None:
    """Start what writes as forks of this process, whose mask, mounts and user they have."""
    have_them_forked(live)


def masked(root: str, mask: int) -> list[str]:
    os.umask(mask)
    fork_from_now_on()
    said = save_and_load(root)
    modes = {stat.S_IMODE(p.lstat().st_mode) for p in [Path(root), *Path(root).rglob("*")]}
    return [said, *sorted(f"{mode:o}" for mode in modes)]


@pytest.mark.parametrize(
    ("mask", "modes"), [(0o077, ["600", "700"]), (0o027, ["640", "750"]), (0, ["666", "777"])]
)
def test_masks(mask: int, modes: list[str], tmp_path: Path, play: Callable[..., list[str]]) -> None:
    assert play(masked, str(tmp_path / "root"), mask) == ["works", *modes]


# -- mounts and users: processes that may change them --------------------------------------------


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=20)


def own_mounts() -> None:
    """Let this process' mounts be its own; skips where it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        pytest.skip("no mounts of its own for a process here")
    try:
        mount("--make-rprivate", "/")
    except (OSError, subprocess.SubprocessError):
        pytest.skip("mount is not permitted here")


def with_small_shm(root: str) -> list[str]:
    """As in a container, whose default is 64 MiB; the state is larger."""
    own_mounts()
    mount("-t", "tmpfs", "-o", "size=16m", "shm", "/dev/shm")
    fork_from_now_on()
    return [save_and_load(root, 5_000_000)]


def with_full_tmp(root: str, folder: str) -> list[str]:
    own_mounts()
    mount("-t", "tmpfs", "-o", "size=16k", "tmp", folder)
    with open(f"{folder}/ballast", "wb", buffering=0) as file:
        file.write(bytes(16 << 10))
    tempfile.tempdir = None
    os.environ["TMPDIR"] = folder
    fork_from_now_on()
    return [save_and_load(root)]


def on_full_disk(root: str) -> list[str]:
    own_mounts()
    mount("-t", "tmpfs", "-o", "size=1m", "disk", root)
    fork_from_now_on()
    said = [save(f"{root}/root"), save(f"{root}/root", 2, 1_000_000), load(f"{root}/root")]
    return [*said, save(f"{root}/root", 3, 50_000)]


def on_read_only(root: str) -> list[str]:
    own_mounts()
    said = [save(root)]
    mount("--bind", root, root)
    mount("-o", "remount,bind,ro", root)
    fork_from_now_on()
    return [*said, load(root), save(root, 2)]


def test_a_small_shm(tmp_path: Path, play: Callable[..., list[str]]) -> None:
    assert play(with_small_shm, str(tmp_path / "root")) == ["works"]


def test_a_full_folder_for_temporary_files(tmp_path: Path, play: Callable[..., list[str]]) -> None:
    (tmp_path / "tmp").mkdir()
    assert play(with_full_tmp, str(tmp_path / "root"), str(tmp_path / "tmp")) == ["works"]


def test_a_full_disk(tmp_path: Path, play: Callable[..., list[str]]) -> None:
    first, full, loaded, again = play(on_full_disk, str(tmp_path))
    assert (first, loaded, again) == ("works", "works", "works")
    assert full.startswith("StoreError no-space: no space left")
    assert "`ckptd gc`" in full


def test_a_read_only_root(tmp_path: Path, play: Callable[..., list[str]]) -> None:
    (tmp_path / "root").mkdir()
    saved, loaded, again = play(on_read_only, str(tmp_path / "root"))
    assert (saved, loaded) == ("works", "works")
    assert again.startswith("StoreError permission: ")
    assert "EROFS" in again


def become(user: int) -> None:
    """Go on as another user, for whom the interpreter lies where that user may look."""
    own_mounts()
    prefix = Path(sys.base_prefix).resolve()
    for folder in reversed(prefix.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            _show(prefix, folder)
            break
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    os.environ.pop("TMPDIR", None)
    tempfile.tempdir = None
    for needed in (sys.executable, ckptd.__file__):
        if not os.access(needed, os.R_OK):
            pytest.skip(f"another user cannot read {needed}")


def _show(prefix: Path, hidden: Path) -> None:
    """Put a folder over `hidden` that has nothing but `prefix`, open to all."""
    with tempfile.TemporaryDirectory() as stage:
        mount("--bind", str(prefix), stage)
        mount("-t", "tmpfs", "-o", "mode=755", "open", str(hidden))
        prefix.mkdir(parents=True)
        mount("--move", stage, str(prefix))


def as_other(root: str, step: int) -> list[str]:
    become(_OTHER)
    return [load(root), save(root, step)]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    if os.geteuid() != 0 or not Path("/dev/shm").is_dir():
        pytest.skip("only root becomes another user")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_another_user_reads(open_folder: Path, play: Callable[..., list[str]]) -> None:
    root = str(open_folder / "root")
    assert play(masked, root, 0o022)[0] == "works"
    loaded, saved = play(as_other, root, 2)
    assert loaded == "works"
    assert saved.startswith("StoreError permission: ")
    assert root in saved


def test_another_user_may_not_read(open_folder: Path, play: Callable[..., list[str]]) -> None:
    root = str(open_folder / "root")
    assert play(masked, root, 0o077)[0] == "works"
    for said in play(as_other, root, 2):
        assert said.startswith("StoreError permission: ")
        assert root in said


def test_another_user_writes(open_folder: Path, play: Callable[..., list[str]]) -> None:
    root = str(open_folder / "root")
    assert play(masked, root, 0)[0] == "works"
    assert play(as_other, root, 2) == ["works", "works"]
    assert load(root, 2) == "works"
    assert [save(root, 3), load(root, 3)] == ["works", "works"]
