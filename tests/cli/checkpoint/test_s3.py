"""The verbs on an object store, set up by the environment as other S3 tools are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from ckptd.store import s3_client
from tests.cli.roots import make_root, values
from tests.cli.running import Cli, process
from tests.servers import MOTO, RADOSGW, s3_moto, s3_radosgw, s3_url

__all__ = ["s3_moto", "s3_radosgw"]


@pytest.fixture(params=[MOTO, pytest.param(RADOSGW, marks=pytest.mark.long)])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    options = request.getfixturevalue(request.param)
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", options["region"])
    s3_client._session.cache_clear()  # a process has one environment; a run of tests has two
    return s3_url()


def test_the_life_of_a_root(cli: Cli, root: str, bucket: str, tmp_path: Path) -> None:
    document = cli.json("doctor", bucket, "--quick")
    assert document["healthy"]
    assert {c["name"]: c["status"] for c in document["checks"]}["create-only"] == "ok"
    assert cli("ls", bucket).code == 4, "the doctor leaves nothing"

    done = cli.json("cp", root, bucket, "--all")["checkpoints"]
    assert [c["state"] for c in done] == ["copied", "copied"]
    assert [c["step"] for c in cli.json("ls", bucket)["checkpoints"]] == [10, 20]
    assert cli("verify", bucket, "--all").code == 0
    assert cli("diff", root, bucket).code == 0
    assert cli("diff", f"{root}@10", bucket).code == 1
    assert "rows / 4" in cli.good("inspect", bucket, "--chunks", "--tensor", "model").out

    cli.good("export", bucket, str(tmp_path / "hf"), "--section", "optim")
    name = "optim.layers.0.mlp.weight.exp_avg"
    found = load_file(tmp_path / "hf" / "model.safetensors")[name.partition(".")[2]]
    assert found.tobytes() == values(20)[name].tobytes()

    cli.good("annotate", f"{bucket}@10", "loss=0.5")
    assert [c["metadata"] for c in cli.json("ls", bucket)["checkpoints"]] == [
        {"loss": 0.5},
        {"loss": 0.05},
    ]
    cli.good("pin", f"{bucket}@10")
    cli.good("gc", bucket, "--keep", "1", "--yes")
    assert [c["step"] for c in cli.json("ls", bucket)["checkpoints"]] == [10, 20]
    cli.good("pin", f"{bucket}@10", "--remove")
    cli.good("rollback", f"{bucket}@10")
    cli.good("gc", bucket, "--abandoned", "0s", "--yes")
    assert [c["step"] for c in cli.json("ls", bucket, "--all")["checkpoints"]] == [10]

    back = str(tmp_path / "back")
    cli.good("cp", bucket, back)
    assert cli("diff", f"{root}@10", back).code == 0


def test_a_process_ends_after_its_work(root: str, bucket: str) -> None:
    """Threads of the client must not keep the interpreter alive, nor complain at its end."""
    done = process("cp", root, bucket)
    assert (done.code, done.err) == (0, "")
    again = process("ls", bucket)
    assert (again.code, again.err) == (0, "")
    assert again.out.splitlines()[1].split()[0] == "20"


def test_a_bucket_that_is_not_there(cli: Cli, bucket: str, tmp_path: Path) -> None:
    missing = "s3://no-such-bucket-of-ckptd/run"
    result = cli("ls", missing, "--json")
    assert result.code in (1, 4)
    assert result.error["where"].startswith("s3://no-such-bucket")
    assert cli("cp", make_root(tmp_path / "r"), missing).code == 1
