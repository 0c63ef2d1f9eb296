"""What ``ckptd demo`` shows of a report."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from ckptd_demo.report import Check, Found, Kill, LifeReport, Pace, Relaid, Report, Watched
from ckptd_demo.verb import _show
from tests.processes import PATIENCE_S

FIRST = LifeReport(
    name="life 1",
    ranks=4,
    layout="FSDP2 2 x TP 2",
    first_step=1,
    last_step=31,
    saves=[10, 20],
    end="rank 2 killed",
    resumed_from=None,
    expected_from=None,
    gap=0.0,
    gap_steps=20,
    ids_equal=True,
    state_exact=None,
    tensors=0,
    tensors_by_diff=0,
    nbytes=0,
    differing=[],
    seconds=12.4,
)
SECOND = msgspec.structs.replace(
    FIRST,
    name="life 2",
    ranks=2,
    layout="FSDP2 2",
    first_step=21,
    last_step=60,
    saves=[],
    end="finished",
    resumed_from=20,
    expected_from=20,
    gap=1.3e-7,
    state_exact=True,
    tensors=212,
    tensors_by_diff=212,
)
REPORT = Report(
    ok=True,
    folder="/demo",
    checkpoints="/demo/checkpoints",
    plot="/demo/loss.png",
    plot_note="",
    seconds=61.0,
    parameters=1_339_840,
    text="ab",
    reference=msgspec.structs.replace(FIRST, name="reference", saves=[], end="finished"),
    lives=[FIRST, SECOND],
    relaid=Relaid(20, "TP 2 x PP 2", "/tmp/demo/resharded", 212, True),
    pace=Pace(2, "FSDP2 2", 24, 24, 0.2, 0.21),
    kill=Kill(30, 1, 2, 7, 8, "data/x/r00002.safetensors", 100, 50, False, False, False, False),
    watched=Watched(
        ranks=4,
        floor_s=2.0,
        url="http://127.0.0.1:8000/",
        found=[
            Found(
                what="slowed",
                rank=1,
                wanted="slow rank",
                said="slow rank",
                suspects=["rank 1"],
                evidence="2 times its own past",
                after_s=8.71,
                floor_s=0.0,
                right=True,
            )
        ],
    ),
    watch_note="",
    elastic=None,
    elastic_note="left out",
    elastic_plot=None,
    checks=[Check("one", True), Check("another", True)],
    next=["ckptd ls /demo/checkpoints"],
)


def _shown(report: Report, capsys: pytest.CaptureFixture[str]) -> str:
    _show(msgspec.to_builtins(report))
    return capsys.readouterr().out


def _row(shown: str, label: str) -> str:
    return next(line for line in shown.splitlines() if line.startswith(label))


def test_a_good_run(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _shown(REPORT, capsys)
    assert _row(shown, "ranks").split() == ["ranks", "4", "4", "2"]
    assert _row(shown, "saves at").split() == ["saves", "at", "none", "10", "20", "none"]
    assert _row(shown, "resumed at").split() == ["resumed", "at", "20"]
    assert _row(shown, "loss gap").split() == ["loss", "gap", "0.0e+00", "1.3e-07"]
    assert _row(shown, "state exact").endswith("yes, 212 tensors")
    assert "absent then" in shown
    assert "24 of 24 snapshots whole" in shown
    assert _row(shown, "rank 1 slowed").split("  ")[1:] == ["slow rank", "rank 1", "8.7 s"]
    assert "1.05 times" in shown
    assert "FAILED" not in shown
    assert "2 of 2 checks hold; 61 s" in shown
    for line in ("checkpoints  /demo/checkpoints", "plot         /demo/loss.png"):
        assert line in shown
    assert shown.endswith("  ckptd ls /demo/checkpoints\n")


def test_what_failed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    bad = msgspec.structs.replace(SECOND, gap=None, ids_equal=False, state_exact=False)
    report = msgspec.structs.replace(
        REPORT,
        lives=[FIRST, bad],
        kill=msgspec.structs.replace(REPORT.kill, commit_end=True),
        checks=[Check("one", True), Check("another", False)],
        plot=None,
        plot_note="no plot",
        watched=None,
        watch_note="not watched without something",
    )
    shown = _shown(report, capsys)
    assert _row(shown, "loss gap").endswith("no value")
    assert _row(shown, "same samples").endswith("NO")
    assert _row(shown, "state exact").endswith("NO")
    assert "PRESENT" in shown
    assert "FAILED  another" in shown
    assert "1 of 2 checks hold" in shown
    assert "plot         no plot" in shown
    assert "not watched without something" in shown


def test_without_torch_the_extra_is_named() -> None:
    # None in sys.modules is how Python itself says that a module cannot be imported.
    code = (
        "import sys; sys.modules['torch'] = None; from ckptd.cli.main import main; main(['demo'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert "pip install 'ckptd[train,plot,monitor]'" in done.stderr
