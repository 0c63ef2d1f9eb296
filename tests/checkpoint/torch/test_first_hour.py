"""What a new user does wrong, or rightly: each says what to do, or simply works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.errors import CkptdError, ConflictError, UsageError
from ckptd.store import open_store
from ckptd.testing.ranks import rank_outcomes
from tests.processes import PATIENCE_S


def memory() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.mark.parametrize(
    "url",
    [
        *(None, 3, b"x", "", "  ", "s3:/b", "S3:/b/c", "s3:b", "file:/x", "memory:x", "gs:/b"),
        *(" s3://b", Path("s3://bucket/run")),
    ],
    ids=repr,
)
def test_what_is_no_root_is_refused(
    url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for opened in (ckptd.Checkpointer, open_store):
        with pytest.raises(UsageError) as caught:
            opened(url)
        assert re.match(
            "invalid URL of a store|a URL (must not have|needs two slashes)", caught.value.message
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["run:1", "./s3:/b", "a/s3:/b", "x"])
def test_folders_may_have_colons(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (url, Path(url)):
        if str(given).startswith("s3:"):
            continue  # a Path drops the dot
        open_store(given).put("k", b"v")
    assert (tmp_path / url / "k").read_bytes() == b"v"


WITHOUT_S3 = """
import contextlib, io, json, sys
from ckptd.cli.main import run

class Missing:
    blocked = ()
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, missing := Missing())
missing.blocked = ("botocore",)
with contextlib.redirect_stderr(io.StringIO()) as errors:
    code = run(["ls", "s3://bucket/run"])
import ckptd
try:
    ckptd.Checkpointer("s3://bucket/run")
except ckptd.errors.CkptdError as error:
    print(json.dumps([code, errors.getvalue(), error.kind, error.hint]))
"""


def test_s3_without_the_extra_names_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_S3], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout, done.stderr
    code, shown, kind, hint = json.loads(done.stdout)
    assert code == 2
    assert "ckptd[s3]" in shown
    assert "defect" not in shown
    assert kind == "missing-package"
    assert "ckptd[s3]" in hint


def test_the_same_step_twice_was_this_run() -> None:
    with ckptd.Checkpointer(memory()) as ck:
        ck.save(5, {"a": 1}).durable(PATIENCE_S)
        with pytest.raises(ConflictError) as caught:
            ck.save(5, {"a": 2}).durable(PATIENCE_S)
    assert "was committed by this run already, in an earlier save" in caught.value.message
    assert "this run" in caught.value.message
    assert "later step" in str(caught.value.hint)


def test_integers_of_numpy_are_steps_and_rules() -> None:
    root = memory()
    with ckptd.Checkpointer(root, every=np.int64(2), keep=np.int32(3)) as ck:  # type: ignore[arg-type]
        saved = [int(n) for n in np.arange(1, 7) if ck.save(n, {"n": np.int64(n)})]
        assert saved == [2, 4, 6]
        ck.wait()
        ck.pin(np.int64(4))  # type: ignore[arg-type]
        state = {"n": np.int64(0)}
        assert ck.load(state, np.uint8(4)) == 4  # type: ignore[arg-type]
        assert state["n"] == 4
        handle = ck.save(torch.tensor(7), state, force=True)  # type: ignore[arg-type]
        assert type(handle.step) is int
        for wrong in (True, np.float64(8), "8", np.array([1, 2]), torch.tensor(8.0), -1):
            with pytest.raises(UsageError, match="invalid step"):
                ck.save(wrong, state)  # type: ignore[arg-type]


def save_on_rank_zero(root: str) -> str:
    if dist.get_rank():
        return ""
    with ckptd.Checkpointer(root, timeout_s=8.0) as ck:
        ck.save(1, {"a": torch.ones(3)})
    return "saved"


@pytest.mark.dist
def test_a_save_on_rank_zero_alone_says_that_every_rank_must(tmp_path: Path) -> None:
    first, second = rank_outcomes(2, save_on_rank_zero, str(tmp_path / "r"), deadline_s=120.0)
    assert second.ok
    assert isinstance(first.error, CkptdError)
    assert "every rank must call save()" in str(first.error)
    assert "died" not in first.error.message


class Progress(NamedTuple):
    epoch: int
    where: Path


def test_values_of_a_state_come_back_as_they_were() -> None:
    root = memory()
    state: dict[str, Any] = {
        "p": Progress(3, Path("/data")),
        "r": range(5),
        "t": {"a": [Path("x")]},
    }
    tensors = Pair(torch.ones(2), torch.zeros(2))
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, state | {"pair": tensors})
    fresh: dict[str, Any] = {"p": None, "r": None, "t": {"a": []}}
    fresh["pair"] = Pair(torch.zeros(2), torch.zeros(2))
    with ckptd.Checkpointer(root) as ck:
        ck.load(fresh)
    assert {k: fresh[k] for k in state} == state
    assert type(fresh["p"]) is Progress
    assert type(fresh["pair"]) is Pair
    assert torch.equal(fresh["pair"].a, torch.ones(2))


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
