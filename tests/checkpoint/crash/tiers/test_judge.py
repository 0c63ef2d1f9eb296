"""The judge of the campaign: it knows what survives, and finds what was lost or changed."""

from __future__ import annotations

from tests.checkpoint.crash.tiers.judge import Verdict, judge
from tests.checkpoint.crash.tiers.ledger import (
    Begun,
    Claiming,
    Closed,
    Fact,
    Held,
    Killed,
    Promised,
    Restored,
    Started,
)
from tests.checkpoint.crash.tiers.schedule import VICTIMS, draw


def saved(step: int, life: int, tiers: tuple[str, ...], agents: tuple[int, int]) -> list[Fact]:
    """Two ranks on two nodes save, and are promised it on all of `tiers`."""
    facts: list[Fact] = []
    for rank in (0, 1):
        digest = f"{step} of life {life}"
        facts.append(Begun(life=life, rank=rank, step=step, digest=digest, train=str(step)))
        facts.append(
            Held(
                life=life,
                rank=rank,
                step=step,
                generation=life + 1,
                attempt="0001",
                agent=agents[rank],
                near=tiers,
                root=False,
            )
        )
        facts += [
            Promised(
                life=life,
                rank=rank,
                step=step,
                generation=life + 1,
                attempt="0001",
                tier=tier,
            )
            for tier in tiers
        ]
    return facts


def killed(life: int, *agents: int, folders: tuple[int, ...] = ()) -> Killed:
    pids = {f"agent-{n}": pid for n, pid in enumerate(agents)}
    return Killed(life=life, arm=0, victims="-", moment="-", pids=pids, folders=folders)


def loaded(step: int, life: int, writer: int = 0, digest: str | None = None) -> list[Fact]:
    digest = f"{step} of life {writer}" if digest is None and step else digest or ""
    return [
        Restored(life=life, rank=rank, step=step, digest=digest, writer=writer) for rank in (0, 1)
    ]


def then(*parts: list[Fact] | Fact) -> Verdict:
    """Judge a first life that was promised step 3 somewhere, what happened, and the next life."""
    facts: list[Fact] = [Started(life=0, nodes=(0, 1), clean=False), *loaded(0, 0)]
    for part in parts:
        facts += part if isinstance(part, list) else [part]
    return judge(facts)


NEXT = Started(life=1, nodes=(0, 1), clean=False)
A, B = 11, 22


def faults(*parts: list[Fact] | Fact) -> list[str]:
    closed = [Closed(life=1, rank=r) for r in (0, 1)]
    return then(*parts, *closed).faults


def test_memory_is_lost_with_an_agent_and_not_with_trainers() -> None:
    step_3 = saved(3, 0, ("memory",), (A, B))
    assert not faults(step_3, killed(0), NEXT, loaded(3, 1))
    assert not faults(step_3, killed(0, A), NEXT, loaded(0, 1))
    assert "loaded step 0" in faults(step_3, killed(0), NEXT, loaded(0, 1))[0]


def test_a_peer_keeps_what_one_node_loses() -> None:
    step_3 = saved(3, 0, ("peer",), (A, B))
    assert "promised on peer" in faults(step_3, killed(0, A), NEXT, loaded(0, 1))[0]
    assert not faults(step_3, killed(0, A, B), NEXT, loaded(0, 1))


def test_a_folder_survives_processes_and_not_its_node() -> None:
    step_3 = saved(3, 0, ("local",), (A, B))
    assert "promised on local" in faults(step_3, killed(0, A, B), NEXT, loaded(0, 1))[0]
    assert not faults(step_3, killed(0, A, folders=(0,)), NEXT, loaded(0, 1))


def test_the_root_survives_everything() -> None:
    step_3 = saved(3, 0, ("root",), (A, B))
    everything = killed(0, A, B, folders=(0, 1))
    assert "promised on root" in faults(step_3, everything, NEXT, loaded(0, 1))[0]


def test_a_node_that_does_not_come_back_has_nothing() -> None:
    step_3 = saved(3, 0, ("memory",), (A, B))
    alone = Started(life=1, nodes=(1,), clean=False)
    assert not faults(step_3, killed(0), alone, loaded(0, 1)[:1])


def test_other_bytes_are_found() -> None:
    step_3 = saved(3, 0, ("root",), (A, B))
    wrong = faults(step_3, killed(0), NEXT, loaded(3, 1, digest="flipped"))
    assert wrong == ["life 1: step 3 of life 0 is not what was saved"]


def test_ranks_that_loaded_different_steps_are_found() -> None:
    step_3 = saved(3, 0, ("root",), (A, B))
    step_4 = saved(4, 0, ("memory",), (A, B))
    apart = [loaded(4, 1)[0], loaded(3, 1)[1]]
    assert "ranks loaded" in faults(step_3, step_4, killed(0), NEXT, apart)[0]


def test_what_is_later_than_what_was_loaded_is_wanted_no_more() -> None:
    step_3, step_5 = saved(3, 0, ("root",), (A, B)), saved(5, 0, ("memory",), (A, B))
    claiming, last = Claiming(life=1, rank=0, step=3), Started(life=2, nodes=(0, 1), clean=False)
    closed: list[Fact] = [Closed(life=2, rank=rank) for rank in (0, 1)]
    assert not then(
        step_3, step_5, killed(0), NEXT, claiming, killed(1), last, loaded(3, 2), closed
    ).faults
    assert then(step_3, step_5, killed(0), NEXT, killed(1), last, loaded(3, 2), closed).faults


def test_a_promise_that_a_quiet_life_never_got_is_found() -> None:
    quiet = Started(life=1, nodes=(0, 1), clean=True)
    begun = [f for f in saved(4, 1, ("memory",), (A, B)) if not isinstance(f, Promised)]
    assert "never reached ['memory']" in faults(killed(0), quiet, loaded(0, 1), begun)[0]


def test_a_seed_means_one_schedule() -> None:
    assert draw(7) == draw(7)
    assert len({str(draw(seed)) for seed in range(50)}) == 50
    lives = [life for seed in range(200) for life in draw(seed).lives]
    assert {arm.victims for life in lives for arm in life.arms} == set(VICTIMS)
