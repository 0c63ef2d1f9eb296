"""What modules say of themselves, on real ranks: FSDP2, DDP, layouts, ranks that disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckptd
from ckptd.errors import CkptdError
from ckptd.testing.ranks import run_ranks
from tests.processes import PATIENCE_S
from tests.reshard.torch.layout.jobs import (
    PROGRAM,
    contents,
    differing,
    fsdp_job,
    megatron_job,
    whole_job,
)

pytestmark = [pytest.mark.usefixtures("writing_thread"), pytest.mark.dist, pytest.mark.timeout(400)]


class Averaged(nn.Module):
    """Has an average of its weight, sharded as that, and a number: neither is a buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 5)
        nn.init.constant_(self.lin.weight, value)
        nn.init.constant_(self.lin.bias, value)
        self.average = self.lin.weight.detach() * 2
        self.n = int(value)
        self.weighs = 0.0
        own: Any = self
        own.register_state_dict_post_hook(Averaged._say)
        own.register_load_state_dict_pre_hook(Averaged._take)
        own.register_load_state_dict_post_hook(Averaged._derive)

    def _say(self, said: Any, prefix: str, meta: Any) -> None:
        said[prefix + "average"] = self.average
        said[prefix + "n"] = torch.tensor(self.n)

    def _take(self, given: Any, prefix: str, *rest: Any) -> None:
        self.average = given.pop(prefix + "average")
        self.n = int(given.pop(prefix + "n"))

    def _derive(self, keys: Any) -> None:
        self.weighs = float(whole(self.lin.weight.detach()).sum()) / 2


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def model(kind: str, value: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 3), Averaged(value))
    if kind == "fsdp":
        for part in net:
            fully_shard(part, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        fully_shard(net)
        inner: Any = net[1]
        inner.average = inner.lin.weight.detach() * 2
    return DistributedDataParallel(net) if kind == "ddp" else net


def averaged(net: Any) -> Averaged:
    found = (net.module if isinstance(net, DistributedDataParallel) else net)[1]
    assert isinstance(found, Averaged)
    return found


def save(root: str, kind: str, value: float) -> None:
    with ckptd.Checkpointer(root, timeout_s=60.0) as ck:
        handle = ck.save(int(value), {"model": model(kind, value)})
        assert handle is not None
        handle.durable(PATIENCE_S)


def load(root: str, kind: str) -> tuple[int, float, list[float]]:
    net = model(kind, 0.0)
    with ckptd.Checkpointer(root, timeout_s=60.0) as ck:
        ck.load({"model": net})
    found = averaged(net)
    assert isinstance(found.average, DTensor) is (kind == "fsdp")
    return found.n, found.weighs, whole(found.average).flatten().tolist()


@pytest.mark.parametrize(("saved", "loaded"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_words_go_to_another_number_of_ranks(tmp_path: Path, saved: str, loaded: str) -> None:
    wanted = (3, 3.0 * 15 / 2, [6.0] * 15)
    run_ranks(4, save, str(tmp_path), saved, 3.0, deadline_s=PATIENCE_S)
    assert run_ranks(2, load, str(tmp_path), loaded, deadline_s=PATIENCE_S) == [wanted] * 2
    assert load(str(tmp_path), "plain") == wanted


# --- ranks that disagree --------------------------------------------------------------------------


def other_value(net: Any, rank: int) -> None:
    net.n += rank


def other_tensor(net: Any, rank: int) -> None:
    net.average += rank


def one_word_more(net: Any, rank: int) -> None:
    if rank == 1:
        net.register_state_dict_post_hook(
            lambda own, said, prefix, meta: said.__setitem__(prefix + "more", torch.ones(1))
        )


def one_word_less(net: Any, rank: int) -> None:
    def drop(own: Any, said: Any, prefix: str, meta: Any) -> None:
        del said[prefix + "lin.bias"]

    if rank == 1:
        net.register_state_dict_post_hook(drop)


DISAGREEING = [other_value, other_tensor, one_word_more, one_word_less]


def outcomes(root: str) -> list[str]:
    rank = torch.distributed.get_rank()
    found = []
    for change in DISAGREEING:
        net = model("plain", 3.0)
        averaged(net)  # has its own words
        for part in net.parameters():
            nn.init.ones_(part)
        change(averaged(net), rank)
        try:
            with ckptd.Checkpointer(f"{root}/{change.__name__}", timeout_s=60.0) as ck:
                handle = ck.save(1, {"model": net})
                assert handle is not None
                handle.durable(PATIENCE_S)
        except CkptdError as error:
            found.append(f"{error.kind} {error.where}")
        else:
            found.append("durable")
    return found


def test_ranks_whose_modules_say_different_things_are_refused(tmp_path: Path) -> None:
    """By name: neither one rank's words for all, nor one rank's beside another's."""
    wanted = [
        "replicas-differ model.1.n",
        "replicas-differ model.1.average",
        "replicas-differ model.1._own_state",
        "replicas-differ model.1._own_state",
    ]
    for said in run_ranks(2, outcomes, str(tmp_path), deadline_s=PATIENCE_S):
        assert "\n".join(said) == "\n".join(wanted)


# --- stages ---------------------------------------------------------------------------------------


class Stage(nn.ModuleDict):
    """Code of its own sees all that it is given: what other stages have is not for it."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.given = sorted(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)


def stages(root: str) -> tuple[list[str], float]:
    rank = torch.distributed.get_rank()
    saved, fresh = (Stage({f"s{rank}": nn.Linear(1, 1), "t": nn.Linear(1, 1)}) for _ in range(2))
    for part in saved.parameters():
        nn.init.constant_(part, 3.0)
    own: Any = saved[f"s{rank}"]
    nn.init.constant_(own.weight, rank + 1.0)
    with ckptd.Checkpointer(root, timeout_s=60.0) as ck:
        handle = ck.save(1, {"model": saved})
        assert handle is not None
        handle.durable(PATIENCE_S)
        ck.load({"model": fresh})
    mine: Any = fresh[f"s{rank}"]
    return fresh.given, mine.weight.item()


def test_a_stage_gets_what_is_its_own(tmp_path: Path) -> None:
    def names(rank: int) -> list[str]:
        return [f"{part}.{n}" for part in (f"s{rank}", "t") for n in ("bias", "weight")]

    found = run_ranks(2, stages, str(tmp_path), deadline_s=PATIENCE_S)
    assert found == [(names(0), 1.0), (names(1), 2.0)]


# --- a layout -------------------------------------------------------------------------------------


def with_words(module: Any, n: int) -> Any:
    """Give a job's model a number of its own, and one that follows from its weights."""

    def say(own: Any, said: Any, prefix: str, meta: Any) -> None:
        said[prefix + "n"] = torch.tensor(own.n)

    def take(own: Any, given: Any, prefix: str, *rest: Any) -> None:
        own.n = int(given.pop(prefix + "n"))

    def derive(own: Any, keys: Any) -> None:
        own.total = sum(float(whole(p.detach()).sum()) for p in own.parameters())

    module.n = n
    module.register_state_dict_post_hook(say)
    module.register_load_state_dict_pre_hook(take)
    module.register_load_state_dict_post_hook(derive)
    return module


def save_laid(root: str, program: str) -> None:
    module, optim = megatron_job(1, 1)
    state = {"model": with_words(module, 7), "optim": optim}
    with ckptd.Checkpointer(root, layout=f"{program}:mg", timeout_s=60.0) as ck:
        ck.save(1, state)


def load_laid(root: str, program: str) -> tuple[list[str], int, bool]:
    module, optim = fsdp_job(5)
    module = with_words(module, 0)
    with ckptd.Checkpointer(root, layout=f"{program}:hf", timeout_s=60.0) as ck:
        ck.load({"model": module, "optim": optim})
    wrong = differing(contents(module, optim), contents(*whole_job(1, 1)))
    total = sum(float(whole(p.detach()).sum()) for p in module.parameters())
    own: Any = module
    return wrong, int(own.n), bool(own.total == total)


def test_words_beside_what_a_layout_says(tmp_path: Path) -> None:
    program = tmp_path / "job.lay"
    program.write_text(PROGRAM)
    root = str(tmp_path / "root")
    run_ranks(4, save_laid, root, str(program), deadline_s=PATIENCE_S)
    for found in run_ranks(3, load_laid, root, str(program), deadline_s=PATIENCE_S):
        assert found == ([], 7, True)
