"""Rules that aggregate gradients: what the majority says, whatever a few say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptd.elastic.torch.hooks.robust import RULES, flag, median, register, trimmed
from ckptd.errors import UsageError
from ckptd.testing.ranks import run_ranks

ROBUST = ["median", "trimmed", "flag"]


def gradients(workers: int = 8, size: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what all would agree on, and a row a worker with noise of its own."""
    torch.manual_seed(5)
    true = torch.randn(size)
    return true, true + 0.5 * torch.randn(workers, size)


WRONG = {
    "random": lambda row: 100 * torch.randn_like(row),
    "turned": lambda row: -10 * row,
    "huge": lambda row: 1e6 * torch.randn_like(row),
    "none": torch.zeros_like,
    "no number": lambda row: torch.full_like(row, float("nan")),
    "infinite": lambda row: torch.full_like(row, float("inf")),
}


def alike(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("wrong", WRONG)
def test_two_of_eight_cannot_steer(rule: str, wrong: str) -> None:
    true, rows = gradients()
    for bad in (1, 6):
        rows[bad] = WRONG[wrong](rows[bad])
    found = RULES[rule](rows)
    assert alike(found, true) > 0.9
    assert 0.3 < float(found.norm() / true.norm()) < 1.5


@pytest.mark.parametrize("rule", RULES)
def test_all_agree_about_equal_gradients(rule: str) -> None:
    true, _ = gradients()
    assert torch.allclose(RULES[rule](true.repeat(5, 1)), true, atol=1e-5)
    assert torch.equal(RULES[rule](torch.zeros(5, 7)), torch.zeros(7))
    assert RULES[rule](torch.full((4, 3), float("nan"))).isnan().all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_element_types_stay(rule: str, dtype: torch.dtype) -> None:
    true, rows = gradients()
    found = RULES[rule](rows.to(dtype))
    assert found.dtype is dtype
    assert alike(found.float(), true) > 0.9


def test_the_mean_can_be_steered() -> None:
    true, rows = gradients()
    rows[1] = WRONG["turned"](rows[1])
    assert alike(RULES["mean"](rows), true) < 0


def test_coordinates() -> None:
    rows = torch.tensor([[1.0, 9.0], [2.0, 0.0], [3.0, 1.0], [100.0, 2.0]])
    assert median(rows).tolist() == [2.5, 1.5]
    assert trimmed(rows).tolist() == [2.5, 1.5]
    assert median(rows[:3]).tolist() == [2.0, 1.0]
    # Too few to leave anyone out.
    assert trimmed(rows[:2]).tolist() == [1.5, 4.5]


def test_who_is_who_does_not_matter_and_length_does_not_pull() -> None:
    _, rows = gradients()
    found = flag(rows)
    assert torch.allclose(flag(rows.flip(0)), found, atol=1e-4)
    rows[3] *= 1e5
    assert alike(flag(rows), found) > 0.99


def trained() -> tuple[list[list[float]], list[list[float]]]:
    """Train with rank 3 sending rubbish; return parameters with the mean and with `flag`."""
    out = []
    for rule in ("mean", "flag"):
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        register(model, rule)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(30):
            inputs = torch.randn(16, 3)
            wanted = inputs @ torch.tensor([[1.0], [2.0], [3.0]])
            loss = (model(inputs) - wanted).square().mean()
            optimizer.zero_grad()
            (-20 * loss if dist.get_rank() == 3 else loss).backward()
            optimizer.step()
        out.append(model.module.weight.tolist())
    return out[0], out[1]


@pytest.mark.dist
def test_a_job_with_one_bad_worker_learns() -> None:
    results = run_ranks(4, trained)
    assert all(r == results[0] for r in results)
    mean, robust = (torch.tensor(x) for x in results[0])
    wanted = torch.tensor([[1.0, 2.0, 3.0]])
    assert float((robust - wanted).norm()) < 0.5
    assert not float((mean - wanted).norm()) < 0.5


def test_there_is_no_such_rule() -> None:
    with pytest.raises(UsageError):
        register(torch.nn.Linear(1, 1), "loudest")  # type: ignore[arg-type]
