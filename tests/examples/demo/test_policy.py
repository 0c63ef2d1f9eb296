"""The demo's policy: what its rollout computes is the model, and what is said against a bad run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch.nn import functional

from ckptd.lay.bind import bind_sizes
from ckptd.lay.local import local_tensors
from ckptd.lay.stored import StoredForm
from ckptd.reshard.layouts import read_text
from ckptd_demo.model import Gpt, build
from ckptd_demo.plot import draw_policy
from ckptd_demo.policy import PolicyRows, checks_of_policy
from ckptd_demo.policyjob import (
    SHAPE,
    TP,
    AppliedRow,
    PublishedRow,
    layout_of,
    logits,
    reward_of,
    rollout_parts,
)
from ckptd_demo.report import Outage, Policy, PolicyLife, Report
from ckptd_demo.verb import _show
from tests.examples.demo.test_cli import REPORT

TOLD = Policy(
    lives=[
        PolicyLife("FSDP2 2 x TP 2", 4, 0, 8, 9, 0.1, 0.12, 0.03),
        PolicyLife("FSDP2 3", 3, 8, 14, 7, 0.12, 0.2, 0.03),
    ],
    versions=12,
    applied=24,
    equal=24,
    together=[True, True],
    outage=Outage(1, 6.2, 4, 5, 2),
    bytes_needed=1000,
    bytes_moved=900,
    bytes_unchanged=100,
    lag_s=0.2,
    most_lag_s=0.9,
)


def whole(model: Gpt) -> dict[str, torch.Tensor]:
    return {n: t.detach() for n, t in model.named_parameters()}


def test_the_rollouts_logits_are_those_of_the_model() -> None:
    model = build(SHAPE, 3)
    parts = dict(enumerate(rollout_parts(whole(model))))
    samples = torch.randint(256, (3, SHAPE.seq + 1), generator=torch.Generator().manual_seed(1))
    found = torch.cat(logits(parts, samples[:, :-1], lambda two: two[0] + two[1]), -1)
    loss = functional.cross_entropy(found.flatten(0, 1), samples[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss, model(samples).detach())


def test_the_layouts_say_what_the_ranks_hold() -> None:
    tensors = whole(Gpt(SHAPE))
    wanted = [{n: tuple(t.shape) for n, t in p.items()} for p in rollout_parts(tensors)]
    sizes = {"h": SHAPE.width, "hd": SHAPE.width // SHAPE.heads, "p": SHAPE.seq, "l": SHAPE.layers}
    form = StoredForm(
        bind_sizes(
            read_text(layout_of("rollout"), "policy").resolve(), {**sizes, "f": 4 * SHAPE.width}
        )
    )
    for rank in range(TP):
        found = {t.name: t.shape for t in local_tensors(form, rank) if not t.state}
        assert {n.removeprefix("model."): s for n, s in found.items()} == wanted[rank]


def test_the_reward_counts_lower_case_letters() -> None:
    assert reward_of(torch.tensor([list(b"aZz?"), list(b"abcd")])).tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"equal": 23}, "bit for bit"),
        ({"together": [True, False]}, "the same versions"),
        ({"outage": Outage(1, 6.2, 0, 5, 2)}, "went on"),
        ({"outage": Outage(1, 6.2, 4, 1, 2)}, "no older weights"),
        ({"bytes_moved": 1000}, "bytes moved"),
        ({"lives": [TOLD.lives[0], TOLD.lives[0]]}, "had stopped"),
        ({"lives": [TOLD.lives[1], TOLD.lives[0]]}, "reward"),
    ],
)
def test_what_does_not_hold_is_said(change: dict[str, object], said: str) -> None:
    assert all(c.ok for c in checks_of_policy(TOLD))
    bad = [c.what for c in checks_of_policy(msgspec.structs.replace(TOLD, **change)) if not c.ok]
    assert any(said in what for what in bad)


def test_it_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = msgspec.structs.replace(REPORT, policy=TOLD, policy_plot="/demo/policy.png")
    _show(msgspec.to_builtins(report))
    shown = capsys.readouterr().out
    assert "12 versions" in shown
    assert "24 of 24 cases" in shown
    assert "FSDP2 3" in shown
    pytest.importorskip("matplotlib")
    published = [
        PublishedRow(n, 1 + n // 3, 4, 10.0 + n, None, "", (), 0.1, last=n % 3 == 2)
        for n in range(6)
    ]
    applied = [
        [AppliedRow(n, n + 1, "x", 1 + n // 3, r, 10.5 + n, "", 9, 9, 0, 0.5) for n in range(6)]
        for r in range(TP)
    ]
    draw_policy(tmp_path / "policy.png", TOLD, PolicyRows(published, applied))
    assert (tmp_path / "policy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(640)
def test_the_part_from_end_to_end(tmp_path: Path) -> None:
    command = "from ckptd.cli.main import main; main()"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            command,
            "demo",
            "--rl",
            "--quick",
            "--json",
            "--dir",
            tmp_path / "d",
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    del document["verb"], document["schema"]
    report = msgspec.convert(document, Report)
    assert report.policy is not None
    assert report.policy.equal == report.policy.applied >= 12
    assert [life.ranks for life in report.policy.lives] == [4, 3]
    assert (tmp_path / "d" / "policy.png").exists()
