"""`dcp.save` and `dcp.load` on roots of ckptd, in one process."""

from __future__ import annotations

import io
import pickle
import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptd
from ckptd.checkpoint.save import BoxRoot
from ckptd.errors import CkptdError
from ckptd_dcp import CkptdReader, CkptdWriter, atroot
from tests.cli.running import Cli

pytestmark = pytest.mark.usefixtures("writing_thread")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def cause(error: BaseException) -> CkptdError:
    """Return what DCP wrapped."""
    failures: Any = getattr(error, "failures", None)
    found = failures[0][0] if failures else error
    assert isinstance(found, CkptdError), error
    return found


def state() -> dict[str, Any]:
    tensors = {
        str(d).removeprefix("torch."): torch.arange(1, 13).reshape(3, 4).to(d) for d in DTYPES
    }
    return {
        "types": tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "step": 7,
        "plain": {"a": [1, "two", None], "b": (3.5, True)},
        "big": ["x" * 40] * 1000,
        "ordered": OrderedDict(z=1, a=torch.Size([2, 3])),
    }


def test_all_types_come_back(tmp_path: Path, cli: Cli) -> None:
    root = str(tmp_path / "root")
    wanted = state()
    dcp.save(wanted, storage_writer=CkptdWriter(root, step=7, metadata={"loss": 0.5}))
    found = state()
    for name, tensor in found["types"].items():
        found["types"][name] = torch.zeros_like(tensor)
    for name in ("scalar", "turned", "conjugate"):
        found[name] = torch.zeros_like(wanted[name])
    found |= {"step": 0, "big": [], "ordered": OrderedDict(z=0, a=None)}
    found["plain"] = {"a": [0, "", 0], "b": (0.0, False)}
    dcp.load(found, storage_reader=CkptdReader(root))
    for name, tensor in wanted["types"].items():
        assert torch.equal(found["types"][name].view(torch.uint8), tensor.view(torch.uint8)), name
    for name in ("scalar", "turned", "conjugate", "empty"):
        assert torch.equal(found[name], wanted[name])
    for name in ("step", "plain", "big", "ordered"):
        assert found[name] == wanted[name], name
    listed = cli.json("ls", root)
    assert [c["step"] for c in listed["checkpoints"]] == [7]
    cli.json("verify", root)


def test_a_module_goes_to_a_checkpointer_and_back(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    torch.manual_seed(1)
    model, other, third = (nn.Linear(5, 3) for _ in range(3))
    dcp.save({"model": model.state_dict()}, storage_writer=CkptdWriter(root, 1))
    with ckptd.Checkpointer(root) as ck:
        assert ck.load({"model": other}) == 1
        assert torch.equal(model.weight, other.weight)
        with torch.no_grad():
            other.weight += 1
        ck.save(2, {"model": other, "rng": ckptd.Rng()})
    into = {"model": third.state_dict()}
    dcp.load(into, storage_reader=CkptdReader(root, 2))
    assert torch.equal(into["model"]["weight"], other.weight)


def test_a_line_goes_on(tmp_path: Path) -> None:
    """Writers of one process are one life; an older life cannot commit any more."""
    root = str(tmp_path / "root")
    x = {"x": torch.ones(3)}
    for step in (1, 2):
        dcp.save(x, storage_writer=CkptdWriter(root), checkpoint_id=str(step))
    with pytest.raises(dcp.CheckpointException, match="not later") as caught:
        dcp.save(x, storage_writer=CkptdWriter(root, 1))
    assert cause(caught.value).kind == "behind"
    with ckptd.Checkpointer(root) as ck:
        assert ck.load({"x": torch.zeros(3)}) == 2
        ck.save(3, x)
    with pytest.raises(dcp.CheckpointException, match="superseded") as caught:
        dcp.save(x, storage_writer=CkptdWriter(root, 4))
    assert cause(caught.value).kind == "superseded"


def test_one_root_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a job that loads by one spelling, and saves by another, goes on from nothing."""
    root = tmp_path / "root"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(root)
    x = {"x": torch.ones(3)}
    relative = CkptdWriter("root", 1)
    monkeypatch.chdir("/")
    dcp.save(x, storage_writer=relative)
    monkeypatch.chdir(tmp_path)
    for url in ("root/", "./root", f"{root}/", f"file://{root}/", str(tmp_path / "link")):
        assert CkptdReader(url).root is CkptdWriter(str(root)).root
    assert atroot._place(root) == CkptdWriter(str(root))._url
    assert CkptdReader("s3://b/x/")._url == CkptdWriter("s3://b/x")._url
    monkeypatch.setattr(atroot, "_roots", {})
    dcp.load(x, storage_reader=CkptdReader(f"{root}/"))
    dcp.save(x, storage_writer=CkptdWriter("root", 2))
    for url in ("s3://", "memory://", "file:/x", "file://x", "file://", ""):
        with pytest.raises(CkptdError) as caught:
            CkptdReader(url).root  # noqa: B018 - it opens the root
        assert re.search("no store|slashes|bucket|name|URL", caught.value.message)


def test_a_look_at_an_older_checkpoint_changes_no_line(
    tmp_path: Path, cli: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    """What a process continues from is what it loaded whole."""
    root = str(tmp_path / "root")
    x = {"w": torch.ones(2), "ema": torch.ones(2), "note": "a"}
    with ckptd.Checkpointer(root) as ck:
        for step in (1, 2, 3):
            ck.save(step, x)
    into = {"w": torch.zeros(2)}
    dcp.load(into, storage_reader=CkptdReader(root))
    with pytest.raises(dcp.CheckpointException, match="loaded") as caught:
        dcp.save(x, storage_writer=CkptdWriter(root, 4))
    assert cause(caught.value).kind == "not-loaded"  # a part is no claim
    dcp.load(dict(x), storage_reader=CkptdReader(root))
    dcp.load(into, storage_reader=CkptdReader(root, 1))
    assert "behind" not in caplog.text
    dcp.save(x, storage_writer=CkptdWriter(root, 4))
    assert [c["step"] for c in cli.json("ls", root)["checkpoints"]] == [1, 2, 3, 4]


def test_an_older_checkpoint_loaded_whole_is_gone_back_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path / "root")
    x = {"w": torch.ones(2)}
    with ckptd.Checkpointer(root) as ck:
        for step in (1, 2, 3):
            ck.save(step, x)
    dcp.load(x, storage_reader=CkptdReader(root, 1))
    assert "step 1 is loaded and 3 is the newest" in caplog.text
    dcp.save(x, storage_writer=CkptdWriter(root, 2))
    with ckptd.Checkpointer(root) as ck:
        assert ck.latest() == 2


@pytest.mark.parametrize("where", ["write", "commit"])
def test_nothing_is_there_before_the_commit(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    root = str(tmp_path / "root")
    dcp.save({"x": torch.ones(3)}, storage_writer=CkptdWriter(root, 1))

    def die(*given: object) -> None:
        raise OSError("the machine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(BoxRoot, where, die)
        with pytest.raises(dcp.CheckpointException, match="gone"):
            dcp.save({"x": torch.zeros(3)}, storage_writer=CkptdWriter(root, 2))
    found = {"x": torch.zeros(3)}
    dcp.load(found, storage_reader=CkptdReader(root))
    assert torch.equal(found["x"], torch.ones(3))
    dcp.save({"x": torch.full((3,), 2.0)}, storage_writer=CkptdWriter(root, 2))
    dcp.load(found, storage_reader=CkptdReader(root))
    assert found["x"][0] == 2
    cli.json("verify", root)


@pytest.mark.parametrize(
    ("saved", "options", "words"),
    [
        ({"x": torch.ones(1)}, {}, "this use of DCP is not supported"),
        ({"x": torch.ones(1)}, {"checkpoint_id": "last"}, "a checkpoint_id is not a step"),
        ({"x": lambda: 0}, {"checkpoint_id": "1"}, "cannot be saved"),
        (
            {"x": torch.ones(1)},
            {"checkpoint_id": "1", "planner": dcp.DefaultSavePlanner(enable_plan_caching=True)},
            "",
        ),
    ],
    ids=["no-step", "no-number", "function", "first-cached"],
)
def test_what_cannot_be_saved(
    saved: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    writer = CkptdWriter(str(tmp_path / "root"))
    if not words:
        dcp.save(saved, storage_writer=writer, **options)
        words, options = (
            "this use of DCP is not supported",
            options | {"checkpoint_id": "2"},
        )
    with pytest.raises((dcp.CheckpointException, CkptdError), match=r".") as caught:
        dcp.save(saved, storage_writer=writer, **options)
    assert words in cause(caught.value).message


def test_what_is_not_there(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    found = {"x": torch.ones(1)}
    (tmp_path / "other").touch()
    for url, text in ((root, "nothing is stored here"), (str(tmp_path), "not a checkpoint root")):
        with pytest.raises(dcp.CheckpointException, match=text):
            dcp.load(found, storage_reader=CkptdReader(url))
    dcp.save(found, storage_writer=CkptdWriter(root, 1))
    with pytest.raises(dcp.CheckpointException, match="Missing key"):
        dcp.load({"y": torch.ones(1)}, storage_reader=CkptdReader(root))
    with pytest.raises(dcp.CheckpointException, match="step 5"):
        dcp.load(found, storage_reader=CkptdReader(root, 5))


def plan_of(state: dict[str, Any]) -> Any:
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


def test_ranks_that_disagree(tmp_path: Path) -> None:
    writer = CkptdWriter(str(tmp_path / "root"), 1)
    for other in (torch.ones(4), torch.ones(3, dtype=torch.float64)):
        plans = [plan_of({"x": x}) for x in (torch.ones(3), other)]
        with pytest.raises(CkptdError, match="disagree") as caught:
            writer.prepare_global_plan(plans)
        assert (caught.value.kind, caught.value.where) == ("structure", "x")
    with pytest.raises(CkptdError, match="this use of DCP is not supported"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(CkptdError, match="this use of DCP is not supported"):
        writer.finish(dcp.Metadata({}), [])
    assert not list(tmp_path.iterdir())


def test_a_planner_of_ones_own_gives_plain_values(tmp_path: Path) -> None:
    """What it pickles is read as data, or refused; a default planner's objects are not pickled."""

    class Planner(dcp.SavePlanner):
        def __init__(self, value: Any) -> None:
            self.value = value

        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            pass

        def create_local_plan(self) -> Any:
            return plan_of({"x": 0})

        def create_global_plan(self, all_plans: Any) -> Any:
            return all_plans, dcp.Metadata({})

        def finish_plan(self, new_plan: Any) -> Any:
            return new_plan

        def resolve_data(self, write_item: Any) -> Any:
            body = io.BytesIO()
            torch.save(self.value, body)
            body.seek(0)
            return body

    writer = CkptdWriter(str(tmp_path / "root"))
    dcp.save({}, storage_writer=writer, checkpoint_id="1", planner=Planner({"a": [1, 2.5]}))
    found: dict[str, Any] = {"x": 0}
    dcp.load(found, storage_reader=CkptdReader(str(tmp_path / "root")))
    assert found == {"x": {"a": [1, 2.5]}}
    with pytest.raises(dcp.CheckpointException, match="not a plain value") as caught:
        dcp.save({}, storage_writer=writer, checkpoint_id="2", planner=Planner(tmp_path))
    assert cause(caught.value).kind == "unsavable"


def test_writers_go_to_other_processes() -> None:
    """DCP's background process gets its writer by pickle."""
    assert pickle.loads(pickle.dumps(CkptdWriter("x", 3)))._step == 3


def test_the_plugin_alone_knows_the_types_of_torch() -> None:
    """Nothing else of ckptd that is imported by chance makes them savable."""
    program = (
        "import torch, ckptd_dcp; from ckptd.checkpoint.format import codec;"
        "print(len(codec.encode(torch.Size([2]), 'a')) > 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
