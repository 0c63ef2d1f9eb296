"""A job of three nodes, a store and two workers, with an attacker between all of them."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from ckptd.elastic.log import MembershipLog
from ckptd.store import open_store
from tests.attack.path import PORT
from tests.attack.rank import LAYOUTS
from tests.monitor.cluster.namespaces import Network, needs_namespaces

NODES = 3
STORE, WORKERS = 3, (4, 5)
CALM_S, PATIENCE_S = 60.0, 240.0
REPO = Path(__file__).parents[2]
SETTINGS = {"silent_s": 5, "lease_s": 12, "settle_s": 2, "grow_s": 2, "nodes_s": 120}


class AttackedJob:
    """The processes, each in the network namespace of its machine."""

    def __init__(self, folder: Path, network: Network, seed: int, steps: int) -> None:
        self.folder, self.network = folder, network
        self.secret = secrets.token_hex(32)
        (folder / "job.json").write_text(json.dumps({"steps": steps}))
        (folder / "job.lay").write_text(LAYOUTS)
        (folder / "place").mkdir()
        self.attacker = self._at_hub(["-m", "tests.attack.path", str(folder), str(seed)])
        self.until(lambda: (folder / "ready").exists(), CALM_S)
        where = network.address(STORE)
        self.store = self._on(STORE, "store", ["-m", "tests.attack.store", str(folder), where])
        self.until(lambda: (folder / "store.json").exists(), CALM_S)
        self.launchers = [self._launcher(node) for node in range(NODES)]
        self.workers = [
            self._on(node, f"worker{node}", ["-m", "tests.attack.worker", str(folder), str(node)])
            for node in WORKERS
        ]

    def _at_hub(self, command: list[str]) -> subprocess.Popen[str]:
        self.network.redirect(PORT)
        return self.network.at_hub([sys.executable, *command], self.folder / "attacker.log")

    def _on(self, node: int, name: str, command: list[str]) -> subprocess.Popen[str]:
        run = self.folder / f"run{node}"
        run.mkdir(mode=0o700, exist_ok=True)
        env = {
            "CKPTD_SECRET": self.secret,
            "CKPTD_RUN_DIR": str(run),
            "CKPTD_NODE": f"n{node}",
            "CKPTD_HOST": f"h{node}",
            "CKPTD_BIND": self.network.address(node),
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            return self.network.start(
                node, [sys.executable, *command], env, stdout=log, stderr=log, cwd=REPO
            )

    def _launcher(self, node: int) -> subprocess.Popen[str]:
        flags = ["--job", "attacked", "--node", f"n{node}", "--nnodes", "1:3"]
        flags += ["--rdzv-endpoint", f"{self.network.address(0)}:29400"]
        flags += ["--log", str(self.folder / "log")] if node == 0 else []
        for key, value in SETTINGS.items():
            flags += ["--set", f"{key}={value}"]
        cli = "from ckptd.cli.main import main; import sys; main(sys.argv[1:])"
        script = [str(REPO / "tests/attack/rank.py"), str(self.folder)]
        return self._on(node, f"launcher{node}", ["-c", cli, "run", *flags, *script])

    @property
    def step(self) -> int:
        try:
            return int((self.folder / "step").read_text() or 0)
        except FileNotFoundError:
            return 0

    @property
    def counts(self) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.folder / "counts.json").read_text())
        return found

    @property
    def interventions(self) -> int:
        return sum(n for what, n in self.counts.items() if " of " not in what)

    def meddled(self, goal: int) -> bool:
        """Whether there were so many interventions."""
        return self.interventions >= goal

    def taken(self, node: int) -> int:
        path = self.folder / f"taken-{node}"
        return int([*path.read_text().split(), "0"][0]) if path.exists() else 0

    def until(self, true: Callable[[], bool], seconds: float) -> None:
        """Wait; what is wrong, or takes longer, fails the test with what all have said last."""
        end = time.monotonic() + seconds
        while not true():
            wrong = self.folder / "wrong"
            assert not wrong.exists(), wrong.read_text()
            assert time.monotonic() < end, self.words()
            time.sleep(0.2)

    def words(self) -> str:
        """Return the last lines of all logs."""
        texts = [f"step {self.step}"]
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            texts += [f"{path.stem}: {line}" for line in lines[-8:]]
        return "\n".join(texts)


@contextmanager
def attacked(folder: Path, seed: int, steps: int = 1 << 30) -> Iterator[AttackedJob]:
    """Start all, and end all."""
    with Network(6) as network:
        yield AttackedJob(folder, network, seed, steps)


def campaign(folder: Path, seed: int, interventions: int) -> dict[str, int]:
    """Let the job run, attack it so often, leave it alone, and look at all that it did."""
    with attacked(folder, seed) as job:
        # Before: it trains, and both workers follow.
        job.until(lambda: job.step >= 5, PATIENCE_S)
        job.until(lambda: all(job.taken(w) for w in WORKERS), PATIENCE_S)
        (folder / "meddle").touch()
        while job.interventions < interventions:
            goal = min(job.interventions + 1, interventions)
            job.until(partial(job.meddled, goal), PATIENCE_S)
        (folder / "meddle").unlink()
        # After: the job goes on, and the workers follow it again.
        before, taken = job.step, [job.taken(w) for w in WORKERS]
        job.until(lambda: job.step > before + 10, PATIENCE_S)
        job.until(
            lambda: all(job.taken(w) > n for w, n in zip(WORKERS, taken, strict=True)), PATIENCE_S
        )
        (folder / "finish").touch()
        job.until(lambda: all(each.poll() is not None for each in job.launchers), PATIENCE_S)
        assert [each.poll() for each in job.launchers] == [0] * NODES, job.words()
        sealed = (folder / "seen-TLS").read_bytes()
        assert len(sealed) > 1 << 20
        stored = json.loads((folder / "store.json").read_bytes())["options"]["secret"]
        for seen in (sealed, (folder / "seen-HTTP").read_bytes()):
            for known in (job.secret, stored):
                assert known.encode() not in seen
                assert bytes.fromhex(known) not in seen
            assert b"weights of step" not in seen
        assert not [word for word in (b"manifest", b"attacked", b"rank") if word in sealed]
        # Nobody gave an order: each generation has a fault of the network as its reason.
        with open_store(folder / "log") as store:
            reasons = [record.reason for record in MembershipLog(store).read()]
        assert not [r for r in reasons if "operator" in r or "order" in r], reasons
        return {**job.counts, "steps": job.step, "generations": len(reasons)}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("interventions", [40, 2000])
def test_a_job_is_attacked(
    interventions: int, tmp_path: Path, report: Callable[[str], None]
) -> None:
    needs_namespaces()
    if shutil.which("nft") is None:
        pytest.skip("NOT TESTED: nft is not installed (Debian: apt install nftables)")
    seed = secrets.randbits(32)
    report(f"attack, seed {seed}: {campaign(tmp_path, seed, interventions)}")
