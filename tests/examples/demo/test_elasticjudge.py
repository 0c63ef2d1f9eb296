"""The judge of the elastic demo and campaign finds what it must."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ckptd_demo.elasticjob import RankRow, TrainedRow
from ckptd_demo.judge import largest_difference, lives_of, violations


def row(step: int, generation: int, at: float, ranks: int = 4) -> TrainedRow:
    return TrainedRow(
        step=step, generation=generation, ranks=ranks, loss=1.0 / step, ids=[step, step + 1], at=at
    )


def rank(generation: int, resumed: int, number: int = 0) -> RankRow:
    return RankRow(
        generation=generation,
        rank=number,
        ranks=4,
        node=f"n{number}",
        pid=1,
        resumed=resumed,
        at=0.0,
    )


REFERENCE = {step: row(step, 1, 0.0) for step in range(1, 7)}


@dataclass
class Told:
    """A job of two generations in which nothing is wrong: one step was made again."""

    rows: list[TrainedRow] = field(
        default_factory=lambda: [
            *(row(step, 1, float(step)) for step in range(1, 5)),
            *(row(step, 3, 10.0 + step, ranks=3) for step in range(4, 7)),
        ]
    )
    ranks: list[RankRow] = field(
        default_factory=lambda: [rank(1, 0), rank(1, 0, 1), rank(3, 3), rank(3, 3, 1)]
    )

    def judged(self, promised: dict[int, int] | None = None) -> list[str]:
        return violations(
            self.rows, self.ranks, REFERENCE, until=6, promised=promised or {1: 0, 3: 3}
        )


def test_a_good_job_has_no_violation_and_its_lives_are_told() -> None:
    told = Told()
    assert told.judged() == []
    first, second = lives_of(told.rows, told.ranks)
    assert (first.generation, first.ranks, first.last, first.lost) == (1, 4, 4, 0)
    assert (second.generation, second.ranks, second.resumed, second.lost) == (3, 3, 3, 1)
    assert largest_difference(told.rows, REFERENCE) == 0.0


def test_a_step_that_an_old_generation_makes_later_is_found() -> None:
    told = Told()
    told.rows.append(row(5, 1, 15.0))
    assert any("had begun to" in text for text in told.judged())


def test_a_committed_step_that_is_trained_again_is_found() -> None:
    assert any("was committed" in text for text in Told().judged({3: 4}))


def test_ranks_that_begin_at_other_steps_are_found() -> None:
    told = Told()
    told.ranks.append(rank(3, 2, 2))
    assert any("began at steps" in text for text in told.judged({1: 0}))


def test_a_step_that_nobody_trained_is_found() -> None:
    told = Told()
    told.rows = [r for r in told.rows if r.step != 4]
    assert any("trained 5" in text for text in told.judged())
    told = Told()
    told.ranks = [rank(1, 0), rank(3, 5)]
    assert any("beyond" in text for text in told.judged())
    told = Told()
    told.rows = told.rows[:-1]
    assert told.judged() == ["the last step is 5, not 6"]


def test_other_samples_and_other_losses_are_found() -> None:
    told = Told()
    told.rows[-1] = msgspec.structs.replace(told.rows[-1], ids=[0])
    assert told.judged() == ["step 6 of generation 3 took other samples"]
    told = Told()
    told.rows[-1] = msgspec.structs.replace(told.rows[-1], loss=told.rows[-1].loss * 1.0001)
    assert told.judged() == ["losses differ by 1.0e-04, more than 1e-06"]
