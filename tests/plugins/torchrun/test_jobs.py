"""Jobs under unmodified torchrun, with real agents, workers, signals and controllers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ckptd.elastic.messages import OrderKind
from tests.plugins.torchrun.job import TorchrunJob
from tests.processes import PATIENCE_S

pytestmark = [pytest.mark.dist, pytest.mark.forks("small", "all")]


@contextlib.contextmanager
def _job(folder: Path, nodes: int, *, most: int = 0, **options: int | str) -> Iterator[TorchrunJob]:
    with TorchrunJob(folder, most or nodes, **options) as job:  # type: ignore[arg-type]
        job.start(*range(nodes))
        yield job


def _ends_well(job: TorchrunJob) -> None:
    job.enough()
    codes = job.codes()
    assert set(codes.values()) == {0}, codes
    job.nothing_left()


def test_a_killed_worker_is_replaced_and_the_job_ends_in_good_order(tmp_path: Path) -> None:
    with TorchrunJob(tmp_path, 2) as job:
        job.start(0, 1, CKPTD_SECRET="a secret of no digits, but long")
        first = job.steps(2)
        assert "CKPTD_SECRET" in job.agents[1].environ()
        assert "CKPTD_SECRET" not in job.worker(1).environ()
        assert {e["handed"] for e in job.events() if e["what"] == "born"} == {32}
        job.worker(1).kill()
        second = job.steps(2, first)
        assert job.nodes_of(second) == {"node0", "node1"}
        _ends_well(job)
        steps = [e["step"] for e in job.events() if e["what"] == "step" and e["rank"] == 0]
        assert steps == sorted(steps)
        (log,) = job.runs.glob("controller-*.log")  # agents have removed their folders
        assert log.stat().st_size


@pytest.mark.long
def test_a_fault_of_one_node_costs_the_others_no_restart(tmp_path: Path) -> None:
    with _job(tmp_path, 3, restarts=0) as job:
        generation = job.steps(3)
        # No restart is left: an agent ends at the first death of a worker that it sees.
        job.worker(2).kill()
        job.steps(2, generation, nodes={"node0", "node1"})
        assert job.agents.pop(2).wait(PATIENCE_S) == 1
        _ends_well(job)


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_dies_with_all_its_processes_is_done_without(tmp_path: Path, node: int) -> None:
    with _job(tmp_path, 3) as job:
        generation = job.steps(3)
        job.kill_node(node)
        job.steps(2, generation, nodes={f"node{k}" for k in range(3) if k != node})
        _ends_well(job)


@pytest.mark.long
def test_workers_die_with_their_agent(tmp_path: Path) -> None:
    with _job(tmp_path, 2) as job:
        generation = job.steps(2)
        worker = job.worker(1)
        job.kill_agent(1)
        job.steps(1, generation, nodes={"node0"})
        job.until(lambda: not worker.is_running(), "the end of a worker without an agent")
        _ends_well(job)


@pytest.mark.long
def test_a_stopped_worker_is_replaced_when_a_restart_is_ordered(tmp_path: Path) -> None:
    with _job(tmp_path, 2) as job:
        generation = job.steps(2)
        stopped = job.worker(1)
        stopped.send_signal(signal.SIGSTOP)
        job.order(OrderKind.RESTART)
        job.steps(2, generation, nodes={"node0", "node1"})
        assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
        _ends_well(job)


@pytest.mark.long
def test_a_stopped_agent_is_done_without_and_its_workers_end(tmp_path: Path) -> None:
    with _job(tmp_path, 2, conf=",controller.silent_s=2") as job:
        generation = job.steps(2)
        zombie = job.agents[1]
        old = job.worker(1)
        zombie.send_signal(signal.SIGSTOP)
        alone = job.steps(1, generation, nodes={"node0"})
        zombie.send_signal(signal.SIGCONT)
        # It is told that its generation is over, and comes back with a new worker.
        job.steps(2, alone, nodes={"node0", "node1"})
        assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
        _ends_well(job)


@pytest.mark.long
def test_an_excluded_node_is_parked_until_it_is_added(tmp_path: Path) -> None:
    with _job(tmp_path, 2) as job:
        generation = job.steps(2)
        job.order(OrderKind.EXCLUDE, 1)
        alone = job.steps(1, generation, nodes={"node0"})
        assert job.agents[1].is_running()
        job.order(OrderKind.ADD, 1)
        job.steps(2, alone, nodes={"node0", "node1"})
        _ends_well(job)


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_lost_node(tmp_path: Path) -> None:
    with _job(tmp_path, 3, most=2) as job:
        generation = job.steps(2)
        members = job.nodes_of(generation)
        (spare,) = {"node0", "node1", "node2"} - members
        lost = sorted(members)[1]
        job.kill_node(int(lost[-1]))
        job.steps(2, generation, nodes=members - {lost} | {spare})
        _ends_well(job)


@pytest.mark.long
def test_a_job_grows_when_a_node_comes(tmp_path: Path) -> None:
    with _job(tmp_path, 1, most=2, conf=",controller.gather_s=0.5") as job:
        generation = job.steps(1)
        life = job.status().life
        job.start(1)
        job.steps(2, generation, nodes={"node0", "node1"})
        assert job.status().life == life  # nobody took its seat
        _ends_well(job)


@pytest.mark.long
def test_a_controller_that_is_killed_goes_on_from_its_log(tmp_path: Path) -> None:
    with _job(tmp_path, 2) as job:
        generation = job.steps(2)
        life = job.status().life
        (controller,) = job.processes("controller")
        controller.kill()
        job.until(lambda: job.status().life not in ("", life), "another life of the controller")
        job.until(lambda: job.status().state == "running", "the end of its doubts")
        assert job.status().generation == generation
        job.worker(0).kill()
        second = job.steps(2, generation)
        assert second > generation
        _ends_well(job)


@pytest.mark.long
def test_a_controller_that_is_stopped_with_its_agent_is_stood_in_for(tmp_path: Path) -> None:
    with _job(tmp_path, 2, conf=",controller.silent_s=2") as job:
        generation = job.steps(2)
        (controller,) = job.processes("controller")
        node = next(k for k, agent in job.agents.items() if agent.pid == controller.ppid())
        for process in (controller, job.agents[node]):
            process.send_signal(signal.SIGSTOP)
        alone = job.steps(1, generation, nodes={f"node{1 - node}"})
        for process in (controller, job.agents[node]):
            process.send_signal(signal.SIGCONT)
        job.steps(2, alone, nodes={"node0", "node1"})
        _ends_well(job)


@pytest.mark.long
def test_an_agent_whose_secret_is_another_one_says_so_and_takes_no_seat(tmp_path: Path) -> None:
    with _job(tmp_path, 1, most=2, conf=",controller.gather_s=0.5") as job:
        job.steps(1)
        life = job.status().life
        job.start(1, CKPTD_SECRET="another one" * 3)
        log = tmp_path / "node1.log"
        job.until(lambda: "refuses node node1" in log.read_text(), "words of the agent")
        made = len(job.events())
        job.until(lambda: len(job.events()) > made + 300, "steps")  # longer than a stand-in waits
        assert job.status().life == life


@pytest.mark.long
def test_a_job_that_is_stopped_ends_every_agent(tmp_path: Path) -> None:
    with _job(tmp_path, 3, most=2) as job:
        job.steps(2)
        job.order(OrderKind.STOP)
        codes = job.codes()
        assert set(codes.values()) == {130}, codes
        job.nothing_left()


@pytest.mark.long
def test_workers_of_several_ranks_are_told_of_as_one_node(tmp_path: Path) -> None:
    with TorchrunJob(tmp_path, 2) as job:
        job.start(0, 1, PET_NPROC_PER_NODE="2")
        job.steps(2)
        _ends_well(job)
