"""What ranks read in torch's store was written by a rank, and the job's secret is not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import ckptd
from ckptd.base.net.handed import key_of_ranks
from ckptd.base.net.signing import SECRET_VARIABLE, derived_key
from ckptd.base.runtime.announcements import Announcements
from ckptd.base.runtime.ranks import Peers
from ckptd.base.torch.ranks import Agreement, JobBoard, board_of, host_count
from ckptd.checkpoint.save.tiers import Local, Memory, Peer
from ckptd.errors import CorruptError, DeadlineError, RefusedError, UsageError
from ckptd.reshard.live.move import MoveWatch
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.usefixtures("writing_thread")

SECRET = b"a secret of no digits, but long"


def boards(store: Any, *secrets: bytes | None) -> list[JobBoard]:
    return [JobBoard(store, rank, 2, "job/", secret) for rank, secret in enumerate(secrets)]


def test_a_value_without_the_mac_is_refused() -> None:
    store = HashStore()
    one, other = boards(store, SECRET, SECRET)
    one.set("a", b"value")
    assert other.get("a", 1.0) == other.clone().get("a", 1.0) == b"value"
    one.set("empty", b"")
    assert other.peek("empty") == b""
    true = store.get("job/a")
    forged = (b"value", b"", true[:-1] + b"f", bytes(16) + b"value", true + b"x")
    for value in forged:
        store.set("job/a", value)
        for read in (lambda: other.peek("a"), lambda: other.get("a", 1.0)):
            with pytest.raises(RefusedError) as caught:
                read()
            assert caught.value.kind == "bad-mac"
    store.set("job/b", true)  # what a rank said of another thing
    with pytest.raises(RefusedError):
        other.peek("b")


ASKED: dict[str, tuple[int, Callable[[JobBoard], object]]] = {
    "agree/1/a": (1, lambda board: Agreement(board, 1.0).on_rank_zero("a", dict)),
    "agree/1/hosts/answer": (1, lambda board: host_count(Agreement(board, 1.0))),
    "agree/1/hosts/1": (0, lambda board: host_count(Agreement(board, 1.0))),
    "agree/1/errors/all": (1, lambda board: Agreement(board, 1.0).no_errors(None)),
    "agree/1/errors/1": (0, lambda board: Agreement(board, 1.0).no_errors(None)),
    "agree/process/0": (1, lambda board: Peers(board, "agree").runs(0)),
    "move/failed": (1, lambda board: MoveWatch(board, "move", 1.0).look()),
    "due/1": (1, lambda board: Announcements(board).word(lambda _: "", None)),
}


@pytest.mark.parametrize("raw", [b"+{", b'-["m"]', b"\xff"])
@pytest.mark.parametrize("name", ASKED)
def test_without_a_secret_what_no_rank_writes_is_an_error_all_the_same(
    name: str, raw: bytes
) -> None:
    """A stranger at the store gave a traceback of a decoder."""
    store = HashStore()
    rank, ask = ASKED[name]
    board = boards(store, None, None)[rank]
    store.set(f"job/{name}", raw)
    with pytest.raises(CorruptError, match="not written by a rank of this version"):
        ask(board)


def torch_store(kind: str, folder: Path) -> Any:
    if kind == "hash":
        return HashStore()
    if kind == "file":
        return FileStore(str(folder / "store"), 1)
    return TCPStore("127.0.0.1", 0, 1, True, use_libuv=kind == "tcp")


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "tcp without libuv"])
@pytest.mark.parametrize("prefix", [False, True])
def test_values_are_read_together_or_not_at_all(kind: str, prefix: bool, tmp_path: Path) -> None:
    made = torch_store(kind, tmp_path)
    store = PrefixStore("p", made) if prefix else made
    one, other = boards(store, SECRET, SECRET)
    one.set("a", b"value")
    assert other.peek_all(["a", "b"]) is None
    one.set("b", b"")
    assert other.peek_all(["b", "a"]) == [b"", b"value"]
    store.set("job/b", store.get("job/a"))
    with pytest.raises(RefusedError):
        other.peek_all(["a", "b"])


@pytest.mark.parametrize("secrets", [(SECRET, None), (None, SECRET), (SECRET, b"another" * 4)])
def test_ranks_with_different_secrets_refuse_each_other(
    secrets: tuple[bytes | None, bytes | None],
) -> None:
    one, other = boards(HashStore(), *secrets)
    one.set("a", b"value")
    if other._secret is None:
        assert other.peek("a") != b"value"
    else:
        with pytest.raises(RefusedError, match="CKPTD_SECRET must be set on all nodes"):
            other.peek("a")


def test_counters_are_counted() -> None:
    for secret in (SECRET, None):
        one, other = boards(HashStore(), secret, secret)
        assert other.count("n") == 0
        assert [one.add("n"), other.add("n", 2)] == [1, 3]
        assert one.count("n") == other.count("n") == 3
        one.delete("n")
        assert other.count("n") == 0
        with pytest.raises(DeadlineError):
            one.get("nobody", 0.01)


def test_a_short_secret_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(UsageError) as caught:
        from ckptd.base.net.signing import given_secret

        given_secret()
    assert "the secret has the wrong length" in caught.value.message


def told(store: Any) -> dict[str, bytes]:
    """Return all that is in torch's store."""
    return {key: store.get(key) for key in store.list_keys() if "/process/" not in key}


def save_on_two_nodes(root: str, folder: str) -> dict[str, bytes]:
    os.environ["CKPTD_NODE"] = f"n{torch.distributed.get_rank()}"
    tiers = [Memory(every=1), Peer(every=1), Local(folder, every=1)]
    with ckptd.Checkpointer(root, tiers=tiers, timeout_s=PATIENCE_S) as ck:
        for step in (1, 2):
            handle = ck.save(step, {"w": torch.full((100,), float(step))})
            for tier in handle.near:
                handle.durable(PATIENCE_S, tier=tier)
            handle.durable(PATIENCE_S)
        torch.distributed.barrier()
        return told(torch.distributed.distributed_c10d._get_default_store())


@pytest.mark.dist
@pytest.mark.parametrize("secret", [SECRET.decode(), bytes(range(32)).hex(), ""])
def test_the_secret_and_its_keys_are_not_in_torchs_store(tmp_path: Path, secret: str) -> None:
    env = {SECRET_VARIABLE: secret, "CKPTD_RUN_DIR": str(tmp_path / "run")}
    (tmp_path / "run").mkdir(mode=0o700)
    places = str(tmp_path / "root"), str(tmp_path / "near")
    for values in run_ranks(2, save_on_two_nodes, *places, env=env, deadline_s=110.0):
        everything = b"".join(values.values())
        assert b"ckptd://127.0.0.1" in everything, "the nodes know each other by the store"
        if not secret:
            continue
        common = key_of_ranks(secret.encode())
        keys = [derived_key(common, "agent", f"n{rank}") for rank in range(2)]
        for key in (secret.encode(), bytes(range(32)), common, *keys):
            assert key not in everything
            assert key.hex().encode() not in everything


def forge(root: str) -> str:
    """Rank 1 reads what a stranger wrote where rank 0 writes."""
    board = board_of(None, PATIENCE_S)
    if board.rank == 0:
        torch.distributed.distributed_c10d._get_default_store().set(f"{board._prefix}a", "lie")
    torch.distributed.barrier()
    try:
        board.get("a", 10.0)
    except RefusedError as error:
        return error.kind
    return "believed"


@pytest.mark.dist
def test_what_a_stranger_writes_into_torchs_store_is_not_believed(tmp_path: Path) -> None:
    env = {SECRET_VARIABLE: SECRET.decode()}
    assert run_ranks(2, forge, str(tmp_path), env=env) == ["bad-mac"] * 2
