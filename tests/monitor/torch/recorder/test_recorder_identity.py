"""Training programs compute the same to the bit whether a recorder watches them or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.monitor.job import CallFlag, Phase
from ckptd.monitor.ring import RecorderState, RingReader
from tests.monitor.torch.recorder.identity_program import STEPS
from tests.monitor.torch.recorder.test_recorder import use

PROGRAM = Path(__file__).with_name("identity_program.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def train(folder: Path, program: str, ranks: int, **settings: str) -> dict[str, str]:
    """Run a program, by torchrun if it has more than one rank; return the hash of each rank."""
    folder.mkdir()
    out = folder / "out"
    out.mkdir()
    launcher = () if ranks == 1 else (*TORCHRUN, str(ranks))
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), program, str(out)],
        env=os.environ | {"CKPTD_RINGS": str(folder / "rings"), "OMP_NUM_THREADS": "1"} | settings,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text() for path in out.iterdir()}


def check_rings(folder: Path, ranks: int) -> None:
    """Check that every rank was watched until its end, and nothing went wrong with that."""
    paths = list((folder / "rings").glob("*.ring"))
    assert len(paths) == ranks
    for path in paths:
        with RingReader(path) as reader:
            header, view = reader.header(), reader.view()
        assert header.state is RecorderState.OFF
        assert (view.phase, view.step) == (Phase.EXIT, STEPS - 1)
        assert {STEPS - 1, 0} <= set(view.calls["step"].tolist())
        assert Phase.EVAL in view.calls["phase"]
        assert not (view.calls["flags"] & CallFlag.FAILED).any()


def compare(tmp_path: Path, source: str, program: str, ranks: int, **settings: str) -> None:
    """Compare a run without a recorder with one that `source` watches."""
    use(source)
    plain = train(tmp_path / "plain", program, ranks, **settings)
    assert set(plain) == {str(rank) for rank in range(ranks)}
    assert not (tmp_path / "plain" / "rings").exists()
    watched = train(
        tmp_path / "watched", program, ranks, WATCHED="1", CKPTD_RECORDER=source, **settings
    )
    assert watched == plain
    check_rings(tmp_path / "watched", ranks)


@pytest.fixture(autouse=True)
def without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "CKPTD_RECORDER", "CKPTD_RINGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.dist
@pytest.mark.forks("small", "all")
def test_a_plain_script_of_one_rank(tmp_path: Path) -> None:
    compare(tmp_path, "python", "ddp", 1)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("source", ["python", "native"])
@pytest.mark.parametrize(
    ("program", "ranks"), [("ddp", 2), ("fsdp_tp", 4), ("pipeline_fsdp", 4), ("compiled", 2)]
)
def test_a_program_of_several_ranks_by_torchrun(
    tmp_path: Path, source: str, program: str, ranks: int
) -> None:
    compare(tmp_path, source, program, ranks)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("source", ["python", "native"])
def test_functional_calls_that_inductor_compiles(tmp_path: Path, source: str) -> None:
    use("native")  # inductor needs the same compiler
    compare(tmp_path, source, "compiled", 2, BACKEND="inductor")
