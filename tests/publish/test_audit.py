"""What is derived of the weights is refreshed with them, and an audit finds what is not theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import CkptdError, NotFoundError, UsageError
from tests.processes import PATIENCE_S, until

ONE = "mesh O = x:1\nspace s { w[n m]; v[n] }\nlayout one of s on O { w = w[n m]; v = v[n] }\n"


class Engine(nn.Module):
    """An engine that has computed something of its weights when it was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, 5))
        self.v = nn.Parameter(torch.zeros(8))
        self.w_vc = torch.zeros(5, 8)
        self.refreshed: list[str] = []

    def refresh(self, name: str) -> None:
        self.refreshed.append(name)
        setattr(self, name, self.w.detach().t().contiguous())


class Pair:
    def __init__(self, folder: Path, kind: str) -> None:
        at = folder / "at" if kind == "connection" else None
        self.to = None if at else f"file://{folder}/live"
        self.state = {"model": {"w": torch.randn(8, 5), "v": torch.randn(8)}}
        self.engine = Engine()
        self.publisher = ckptd.Publisher(ONE, at, to=self.to, linger_s=0.0)
        self.subscriber = ckptd.Subscriber(
            ONE, self.engine, at or self.to or "", derived={"w_v*": self.engine.refresh}
        )

    def publish(self, step: int) -> None:
        self.state["model"]["w"].normal_()
        assert self.publisher.publish(step, self.state, wait_s=20.0).wait(PATIENCE_S)


@pytest.fixture(params=["connection", "store"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path, request.param)
    with found.publisher, found.subscriber:
        yield found


def test_what_is_derived_follows_and_an_audit_finds_what_is_stale(pair: Pair) -> None:
    engine, subscriber = pair.engine, pair.subscriber
    with pytest.raises(UsageError, match="no published version is held"):
        subscriber.audit()
    for step in (1, 2):
        pair.publish(step)
        assert subscriber.update(20.0) is not None
        assert engine.refreshed == ["w_vc"] * step
        assert torch.equal(engine.w_vc, pair.state["model"]["w"].t())
    assert subscriber.audit() == ()
    engine.w_vc[0, 0] += 1  # as an engine that keeps what it computed before
    assert subscriber.audit() == ("w_vc",)
    assert subscriber.audit() == ()
    engine.v.data[3] = 7
    assert subscriber.audit() == ("v",)
    assert engine.v.tolist()[3] == 7.0  # it is told, not mended
    pair.publish(3)
    assert subscriber.update(20.0) is not None
    assert subscriber.audit() == ()


def test_a_refresh_that_fails_leaves_no_version(pair: Pair) -> None:
    def fail(name: str) -> None:
        raise ValueError("no room")

    pair.subscriber._derived = {"w_vc": fail}
    pair.publish(1)
    with pytest.raises(CkptdError, match="a derived tensor was not refreshed") as caught:
        pair.subscriber.update(20.0)
    assert caught.value.state_corrupted
    assert "no room" in str(caught.value)
    assert pair.subscriber.version is None


def test_a_glob_without_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tensor has the name of a derived one"):
        ckptd.Subscriber(ONE, Engine(), tmp_path / "at", derived={"*.w_kc": print})


def test_a_version_that_is_gone_cannot_be_compared(pair: Pair) -> None:
    pair.publish(1)
    assert pair.subscriber.update(20.0) is not None
    if pair.to:
        for path in (Path(pair.to.removeprefix("file://")) / "versions").iterdir():
            path.unlink()
        pair.subscriber._place._versions.clear()  # type: ignore[union-attr]
    else:
        for step in (2, 3):
            pair.publish(step)
    with pytest.raises(NotFoundError) as caught:
        until(lambda: pair.subscriber.audit() is None, "gone", within_s=5.0)
    assert caught.value.kind == "no-version"
