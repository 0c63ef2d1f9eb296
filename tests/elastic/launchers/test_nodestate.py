"""What a node says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.elastic.launchers.nodestate import NodeState
from ckptd.elastic.linkspeed import keep_measured, of_cards


@pytest.mark.parametrize(
    ("given", "slurm", "domains"),
    [
        (None, None, ()),
        ("", "", ()),
        ("block1/rack7", "s0.s1.node5", ("block1", "rack7")),
        (None, "s0.s1.node5", ("s0", "s1")),
        (None, "node5", ()),
        ("/".join("x" * 300 for _ in range(20)), None, ("x" * 256,) * 8),
    ],
)
def test_a_node_says_where_it_is_in_the_network(
    given: str | None,
    slurm: str | None,
    domains: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("CKPTD_TOPOLOGY", given), ("SLURM_TOPOLOGY_ADDR", slurm)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert NodeState("n", lambda _: None).up(1, "").domains == domains


def test_a_node_says_how_fast_its_links_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("CKPTD_RUN_DIR", str(folder))
    assert NodeState("n", lambda _: None).up(1, "").link_bytes_per_s == 0
    keep_measured(2.5e9, folder)
    said = NodeState("n", lambda _: None).up(1, "")
    assert (said.link_bytes_per_s, said.card_bytes_per_s) == (2_500_000_000, of_cards())
