"""TensorBoard, MLflow and W&B themselves, read back from the files that they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptd_trackers
from tests.plugins.trackers.test_tracking import train
from tests.processes import PATIENCE_S

pytestmark = [pytest.mark.plugins, pytest.mark.usefixtures("writing_thread")]


def run(root: str, *trackers: Any) -> None:
    with ckptd_trackers.track(*trackers, root=root) as tracking:
        train(root, 1, 2)
        train(root, 3, load=True)
    assert tracking.lost == 0


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    root = str(tmp_path / "root")
    with SummaryWriter(str(tmp_path / "runs")) as writer:
        run(root, writer)
    found = EventAccumulator(str(tmp_path / "runs"))
    found.Reload()
    durable = found.Scalars("ckptd/save_durable_s/local")
    assert [s.step for s in durable] == [1, 2, 3]
    assert all(s.value > 0.0 for s in durable)
    assert [s.value for s in found.Scalars("ckptd/generation")] == [1.0, 1.0, 2.0]
    texts = [
        t.tensor_proto.string_val[0].decode()
        for t in found.Tensors("ckptd/checkpoints/text_summary")
    ]
    assert texts == [f"{root}@1-g1", f"{root}@2-g1", f"{root}@3-g2"]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    root = str(tmp_path / "root")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    mlflow.set_experiment("job")
    with mlflow.start_run() as active:
        run(root, active)
    client = mlflow.MlflowClient()
    history = client.get_metric_history(active.info.run_id, "ckptd/save_durable_s/local")
    assert sorted(m.step for m in history) == [1, 2, 3]
    [folder] = (tmp_path / "mlruns").glob("*/*/artifacts/ckptd/checkpoints")
    found = [json.loads(p.read_text()) for p in sorted(folder.iterdir())]
    assert [f["checkpoint"] for f in found] == [f"{root}@1-g1", f"{root}@2-g1", f"{root}@3-g2"]
    assert client.get_run(active.info.run_id).data.tags["ckptd.checkpoint"] == f"{root}@3-g2"
    [text] = folder.parent.glob("restarts/*")
    assert text.read_text() == "went on from step 2 of generation 1"


# A process of its own: W&B removes its folders for temporary files when the process ends.
OFFLINE = """
import json
import struct
import sys
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

import ckptd_trackers
from tests.plugins.trackers.test_tracking import train


def records(raw):
    # Blocks of 32 KiB, with chunks as in a log of LevelDB.
    at, parts = 7, b""
    while at + 7 <= len(raw):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", raw, at + 4)
        parts += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of several
            yield Record.FromString(parts)
            parts = b""


if __name__ == "__main__":
    root, folder = sys.argv[1:]
    with wandb.init(project="job", mode="offline", dir=folder) as run:
        with ckptd_trackers.track(run, root=root) as tracking:
            for step in range(1, 4):
                train(root, step, load=step > 1)
                run.log({"loss": 1.0 / step}, step=step)
    wandb.teardown()
    [path] = Path(folder).glob("wandb/offline-run-*/*.wandb")
    found = list(records(path.read_bytes()))
    artifacts = [r.artifact for r in found if r.HasField("artifact")]
    histories = [r.history.item for r in found if r.HasField("history")]
    told = {
        "lost": tracking.lost,
        "checkpoints": [json.loads(a.metadata)["checkpoint"] for a in artifacts],
        "references": [entry.ref for a in artifacts for entry in a.manifest.contents],
        "alerts": [r.alert.text for r in found if r.HasField("alert")],
        "rows": [
            {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
            for items in histories
        ],
    }
    Path(folder, "told.json").write_text(json.dumps(told))
"""


def test_wandb_offline(tmp_path: Path) -> None:
    root, code = str(tmp_path / "root"), tmp_path / "offline.py"
    code.write_text(OFFLINE)
    own = {f"WANDB_{n}_DIR": str(tmp_path / n) for n in ("CACHE", "DATA", "CONFIG", "ARTIFACT")}
    own |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "WANDB_SILENT": "true"}
    subprocess.run(
        [sys.executable, str(code), root, str(tmp_path)],
        env={**os.environ, **own},
        check=True,
        timeout=PATIENCE_S,
    )
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["lost"] == 0
    assert told["checkpoints"] == [f"{root}@1-g1", f"{root}@2-g2", f"{root}@3-g3"]
    assert told["references"][0] == f"file://{root}/commits/000000000001-g00000001.json"
    assert told["alerts"][0] == "step 1: went on from step 1 of generation 1"
    rows = [(row["_step"], row["loss"]) for row in told["rows"] if "loss" in row]
    # The steps of the user's own calls are what they would be without us.
    assert rows == [(1, 1.0), (2, 0.5), (3, 1.0 / 3)]
    assert any("ckptd/save_blocked_s" in row for row in told["rows"])
