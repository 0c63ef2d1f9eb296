"""What a node says of itself."""

from __future__ import annotations

import pytest

from ckptd.elastic.launchers.nodestate import NodeState


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
