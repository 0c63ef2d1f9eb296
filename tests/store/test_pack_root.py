"""Whole checkpoints at packed roots: every command reads them without being told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.checkpoint.root.opening import root_spec
from ckptd.cli.main import run
from ckptd.errors import CorruptError, UsageError
from ckptd.store import Store, StoreSpec
from tests.processes import PATIENCE_S
from tests.servers import MOTO, s3_url

pytestmark = pytest.mark.usefixtures("writing_thread")

MIB = 1 << 20


def state(seed: int, rows: int = 1500) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(600, rows).to(torch.bfloat16)
    small = {f"small{i}": torch.full((5,), float(seed + i)) for i in range(40)}
    return {"model": model, "moments": torch.randn(rows, 300) * 1e-3, **small}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = [(one["model"].state_dict()[k], v) for k, v in other["model"].state_dict().items()]
    pairs += [(one[k], v) for k, v in other.items() if k != "model"]
    return all(torch.equal(a, b) for a, b in pairs)


class Place:
    """A root, how the library and the command line are told of it, and what lies there really."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self.options = options

    def checkpointer(self, **options: Any) -> ckptd.Checkpointer:
        return ckptd.Checkpointer(self.url, store_options=self.options, **options)

    def bare(self) -> Store:
        return StoreSpec(self.url, self.options).open()

    def names(self) -> list[str]:
        with self.bare() as store:
            return [o.key for o in store.list("data/")]


@pytest.fixture(params=["local", MOTO])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    if request.param == "local":
        yield Place(str(tmp_path / "root"), {})
        return
    from ckptd.store import s3_client

    options = request.getfixturevalue(request.param)
    for name, value in [
        ("AWS_ENDPOINT_URL", options["endpoint_url"]),
        ("AWS_ACCESS_KEY_ID", options["key"]),
        ("AWS_SECRET_ACCESS_KEY", options["secret"]),
        ("AWS_DEFAULT_REGION", options["region"]),
    ]:
        monkeypatch.setenv(name, value)
    s3_client._session.cache_clear()
    yield Place(s3_url(), options)
    s3_client._session.cache_clear()


def save(ck: ckptd.Checkpointer, step: int, values: dict[str, Any]) -> None:
    handle = ck.save(step, values)
    assert handle is not None
    handle.durable(PATIENCE_S)


def cli(*args: str) -> int:
    return run(args)


def test_a_packed_root_is_a_root(place: Place, tmp_path: Path) -> None:
    with place.checkpointer(storage=ckptd.Storage(compress=1)) as ck:
        for step in (1, 2, 3):
            save(ck, step, state(step))
    packed = [n for n in place.names() if ".safetensors" in n]
    assert len(packed) == 3
    assert all(n.endswith(".safetensors.zp") for n in packed)
    with place.bare() as bare, root_spec(place.url, place.options).open() as store:
        key = packed[0]
        assert bare.stat(key).size < 0.95 * store.stat(key.removesuffix(".zp")).size
    for compress in (None, 1):  # the one who reads need not know
        with place.checkpointer(storage=ckptd.Storage(compress=compress)) as ck:
            found = state(9)
            assert ck.load(found, 3) == 3
            assert same(found, state(3))
    url = place.url
    for args in [("ls", url), ("inspect", url), ("verify", url, "--all")]:
        assert cli(*args) == 0, args
    assert cli("diff", f"{url}@1", f"{url}@3", "--json") == 1
    assert cli("diff", f"{url}@3", f"{url}@3", "--json") == 0
    plain = tmp_path / "plain"
    assert cli("cp", f"{url}@3", str(plain)) == 0
    assert len([*plain.rglob("*.safetensors")]) == 1
    assert not [*plain.rglob("*.zp")]
    with ckptd.Checkpointer(str(plain)) as ck:
        found = state(9)
        assert ck.load(found) == 3
        assert same(found, state(3))
    assert cli("export", f"{url}@3", str(tmp_path / "hf"), "--section", ".") == 0
    assert cli("gc", url, "--keep", "1", "--yes") == 0
    assert len([n for n in place.names() if n.endswith(".zp")]) == 1
    assert cli("verify", url, "--all") == 0


def test_retention_deletes_what_is_packed(tmp_path: Path) -> None:
    place = Place(str(tmp_path), {})
    with place.checkpointer(storage=ckptd.Storage(compress=1), keep=1) as ck:
        for step in (1, 2, 3, 4):
            save(ck, step, state(step, 100))
    assert cli("gc", place.url, "--yes") == 0
    folders = {n.split("/")[1] for n in place.names()}
    assert {f[:12] for f in folders} == {"000000000004"}


def test_forms_may_be_mixed(tmp_path: Path) -> None:
    root = str(tmp_path)
    for step, compress in enumerate([None, 1, None, 3], 1):
        with ckptd.Checkpointer(root, storage=ckptd.Storage(compress=compress)) as ck:
            if step > 1:
                found = state(9)
                assert ck.load(found) == step - 1
                assert same(found, state(step - 1))
            ck.save(step, state(step))
    assert cli("verify", root, "--all") == 0


def test_a_bad_level_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ckptd.Checkpointer(str(tmp_path), storage=ckptd.Storage(compress=99))
    assert "invalid level of zstd" in caught.value.message


@pytest.mark.parametrize("cut", [None, 5000, 0])
def test_damage_is_named_and_an_older_step_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: int | None
) -> None:
    root = str(tmp_path)
    with ckptd.Checkpointer(root, storage=ckptd.Storage(compress=1)) as ck:
        for step in (1, 2):
            save(ck, step, state(step))
    [file] = (tmp_path / "data").glob("000000000002-*/*.zp")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.unlink()
    file.write_bytes(raw[:cut])
    assert cli("verify", root) == 3
    assert "r00000.safetensors" in capsys.readouterr().out
    with ckptd.Checkpointer(root) as ck:
        found = state(9)
        with pytest.raises(CorruptError):
            ck.load(found, 2)
        assert same(found, state(9))
        assert ck.load(found) == 1
        assert same(found, state(1))


_KILLED = """
import sys, ckptd, torch
from ckptd.store.base import StoreSpec
from ckptd.store.base import FaultRule, FaultSpec
from ckptd.checkpoint.torch import checkpointer as module
plain = module.root_spec
def faulty(url, options, throttle, compress):
    found = plain(url, options, throttle, compress)
    rule = FaultRule("kill", op=sys.argv[2], key="*.zp")
    return StoreSpec(found.url, found.options, (FaultSpec((rule,)), *found.wrappers))
module.root_spec = faulty
ck = ckptd.Checkpointer(sys.argv[1], storage=ckptd.Storage(compress=1))
try:
    ck.save(2, {"w": torch.randn(3_000_000)}).durable(60)
except ckptd.CkptdError:
    sys.exit(7)
"""


@pytest.mark.parametrize("op", ["write", pytest.param("commit", marks=pytest.mark.long)])
def test_a_writing_process_that_is_killed_leaves_nothing_that_counts(
    tmp_path: Path, op: str
) -> None:
    root = str(tmp_path)
    with ckptd.Checkpointer(root, storage=ckptd.Storage(compress=1)) as ck:
        save(ck, 1, state(1))
    code = [sys.executable, "-c", _KILLED, root, op]
    done = subprocess.run(code, timeout=PATIENCE_S, check=False, capture_output=True)
    assert done.returncode == 7, done.stderr
    assert [*tmp_path.rglob("*.zp")]
    with ckptd.Checkpointer(root) as ck:
        found = state(9)
        assert ck.latest() == 1
        assert ck.load(found) == 1
        assert same(found, state(1))
        ck.save(3, found)
    assert cli("gc", root, "--leftover", "0s", "--yes") == 0
    assert len([*tmp_path.rglob("*.zp")]) == 1
    assert cli("verify", root, "--all") == 0
