from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.monitor.daemon.history import History
from ckptd.monitor.recording import replay
from ckptd_simulated.feed import PlantedAt
from tests.monitor.daemon.daemons import JOB, Running, fed, quick_settings, running
from tests.processes import until

RANKS = 16
HUNG = 5
V1 = "/api/v1"


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A daemon of a job in which one rank hangs, and which has said so."""
    folder = tmp_path_factory.mktemp("stuck")
    with running(folder / "history", events=(str(folder / "none"),)) as daemon:
        with fed(daemon, RANKS, PlantedAt("hang", HUNG, 2.0)):
            until(lambda: any(HUNG in i.stacks for i in daemon.service.rounds.last.incidents))
            yield daemon


def get(daemon: Running, path: str) -> Any:
    answer = daemon.ask("GET", V1 + path)
    assert answer.status == 200, answer.body
    assert answer.headers["cache-control"] == "no-store"
    return answer.document


def test_job(stuck: Running) -> None:
    job = get(stuck, "/job")
    assert job["job"] == JOB
    assert (job["world"], job["ranks_reporting"], job["nodes"]) == (RANKS, RANKS, 4)
    assert job["phases"] == {"TRAIN": RANKS}
    assert job["state"] == "incident"
    assert job["agents"] == {"up": 4, "silent": 0}
    assert job["step"]["min"] <= job["step"]["max"]
    assert job["goodput"]["seconds"]["stuck"] >= 0


def test_ranks_are_columns(stuck: Running) -> None:
    ranks = get(stuck, "/ranks")
    assert ranks["rank"] == list(range(RANKS))
    columns = {k: v for k, v in ranks.items() if isinstance(v, list) and k != "nodes"}
    assert {len(column) for column in columns.values()} == {RANKS}
    assert ranks["pid"] == [ranks["pid"][0] + rank for rank in range(RANKS)]
    assert ranks["status"][HUNG] == 2
    assert ranks["status"].count(1) == RANKS - 1
    assert ranks["pending"][HUNG] is None
    assert all("#" in text for r, text in enumerate(ranks["pending"]) if r != HUNG)
    assert ranks["mesh"]["axes"] == ["pp", "dp", "tp"]
    assert len({tuple(c) for c in ranks["mesh"]["coords"]}) == RANKS


def test_ranks_that_did_not_change_are_left_out(stuck: Running) -> None:
    revision = get(stuck, "/ranks")["revision"]
    news = get(stuck, f"/ranks?since={revision}")
    assert news["since"] == revision
    assert "mesh" not in news
    # Nothing moves, so only ages grow, and they rarely pass a limit.
    assert until(
        lambda: len(get(stuck, f"/ranks?since={get(stuck, '/ranks')['revision']}")["rank"]) == 0
    )


def test_one_rank(stuck: Running) -> None:
    rank = get(stuck, f"/ranks/{HUNG}")
    assert 1.0 <= rank["cpu"] < 1.3
    assert rank["memory"] >= 12 << 30
    assert rank["threads"] == 48
    assert rank["log"] is None  # the simulated job writes none
    assert (rank["rank"], rank["node"], rank["alive"]) == (HUNG, "n1", True)
    assert rank["pid"] == get(stuck, "/ranks")["pid"][HUNG] > 0
    assert {g["kind"] for g in rank["groups"]} >= {"tp", "dp"}
    assert all(c["start_s"] <= c["end_s"] <= rank["now"] for c in rank["calls"])
    assert "simulated rank" in rank["stack"]["text"]
    assert "unknown rank" in stuck.ask("GET", f"{V1}/ranks/999").message
    assert stuck.ask("GET", f"{V1}/ranks/x").status == 404
    assert stuck.ask("GET", f"{V1}/ranks/{'9' * 5000}").status == 404  # too long for `int`


def test_a_rank_is_looked_at_on_request(tmp_path: Path) -> None:
    with running(tmp_path / "h") as daemon, fed(daemon, 16):
        assert until(lambda: len(get(daemon, "/ranks")["rank"]) == 16)
        assert get(daemon, "/ranks/7")["stack"] is None
        path = f"{V1}/ranks/7/look"
        assert daemon.ask("POST", path, b"{}", token=False).status == 401
        assert "unknown rank" in daemon.ask("POST", f"{V1}/ranks/99/look", b"{}").message
        assert daemon.ask("POST", path, b"{}").document["rank"] == 7
        assert until(lambda: get(daemon, "/ranks/7")["stack"])
        stack = get(daemon, "/ranks/7")["stack"]
        assert (stack["incident"], stack["how"]) == ("", "py-spy")
        rank = get(daemon, "/ranks/7")
        assert rank["now"] - 60 < rank["looked_at"] <= rank["now"] + 1
        assert "simulated rank 7" in stack["text"]
        assert get(daemon, "/ranks/6")["stack"] is get(daemon, "/ranks/6")["looked_at"] is None


def test_incidents_and_their_evidence(stuck: Running) -> None:
    (listed,) = get(stuck, "/incidents?state=open")["incidents"]
    assert listed["kind"] == "non-communication hang"
    assert listed["verdict"]["suspects"][0]["name"] == str(HUNG)
    assert "stacks" not in listed
    whole = get(stuck, f"/incidents/{listed['id']}")
    assert str(HUNG) in whole["stacks"]
    assert get(stuck, "/incidents?state=closed")["incidents"] == []
    assert get(stuck, f"/incidents?before={listed['opened_at']}")["incidents"] == []
    assert "unknown incident" in stuck.ask("GET", f"{V1}/incidents/none").message


def test_a_person_has_seen_it(stuck: Running) -> None:
    ident = get(stuck, "/incidents")["incidents"][0]["id"]
    path = f"{V1}/incidents/{ident}/ack"
    told = stuck.ask("POST", path, b'{"note": "looked at"}').document
    assert told["note"] == "looked at"
    assert get(stuck, f"/incidents/{ident}")["acknowledged_at"] == told["acknowledged_at"]
    assert "invalid request" in stuck.ask("POST", path, b'{"note": 1}').message
    assert "invalid request" in stuck.ask("POST", path, b'{"note": "' + b"x" * 3000 + b'"}').message
    assert stuck.ask("POST", path, b"x" * 20000).status == 413
    assert stuck.ask("POST", path, b"{}", token=False).status == 401


def test_calls_and_their_trace(stuck: Running) -> None:
    told = get(stuck, "/collectives?seconds=600&ranks=0-1,3&limit=100000")
    assert [r["rank"] for r in told["ranks"]] == [0, 1, 3]
    calls = told["ranks"][0]["calls"]
    assert len({(c["group"], c["seq"]) for c in calls}) == len(calls)
    assert {c["op"] for c in calls} >= {"all_reduce"}
    few = get(stuck, "/collectives?seconds=600&ranks=0-1&limit=3")
    assert few["cut"]
    assert sum(len(r["calls"]) for r in few["ranks"]) == 3
    events = get(stuck, "/trace?seconds=600&ranks=0-3")["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in events if e["ph"] == "X")
    assert not all(e["args"]["ended"] for e in events if e["ph"] == "X")


@pytest.mark.parametrize(
    "path",
    [
        "/collectives?ranks=x",
        "/collectives?ranks=5-1",
        "/collectives?ranks=0-99999999",
        "/collectives?seconds=nan",
        "/collectives?limit=-1",
        "/trace?seconds=1e9",
        "/history?what=all",
        "/history?what=step,step,step,step,step,step,step",
        "/history?until=x",
        "/incidents?state=lost",
        "/incidents?limit=x",
        "/ranks?since=-1",
    ],
)
def test_requests_that_cannot_be_read(stuck: Running, path: str) -> None:
    answer = stuck.ask("GET", V1 + path)
    assert answer.status == 400
    assert answer.message in ("invalid request", "the list of ranks cannot be parsed")


def test_links(stuck: Running) -> None:
    assert set(get(stuck, "/links")) == {"nodes", "edges", "effects", "at"}


@pytest.mark.long
def test_slow_wires_are_told(tmp_path: Path) -> None:
    with running(tmp_path / "history", settings=quick_settings()) as daemon:
        with fed(daemon, 32, PlantedAt("link", 9, 1.0), PlantedAt("wire", 9, 0.0)):
            links = until(lambda: (told := get(daemon, "/links"))["at"] and told)
    assert sorted(links["nodes"]) == ["n0", "n1", "n2", "n3"]
    assert all(len(edge) == 4 for edge in links["edges"])


def test_elastic(stuck: Running) -> None:
    (one,) = get(stuck, "/elastic")["generations"]
    assert (one["generation"], one["world"], one["ended"]) == (0, RANKS, None)


def test_checkpoints_name_a_folder_that_is_not_there(stuck: Running) -> None:
    told = get(stuck, "/checkpoints")
    assert (told["tiers"], told["saves"]) == ([], [])
    assert "the folder cannot be read" in told["problems"][0]["message"]


def test_history(stuck: Running) -> None:
    series = until(lambda: (told := get(stuck, "/history?what=step"))["at"] and told)
    assert len(series["step_max"]) == len(series["at"])
    assert {"world", "reporting"} <= set(get(stuck, "/history?what=world"))
    both = get(stuck, "/history?what=step,time&seconds=600")
    assert {"step_max", "step_s_median"} <= set(both)
    # The job made steps for two seconds before one of its ranks hung.
    assert any(v and 0.1 < v < 1.0 for v in both["step_s_median"])
    middle = both["at"][len(both["at"]) // 2]
    early = get(stuck, f"/history?what=step&seconds=600&until={middle}")
    assert early["at"]
    assert max(early["at"]) <= middle


def test_jobs_whose_histories_lie_beside(stuck: Running) -> None:
    beside = History(stuck.service.history.path.with_name("other.sqlite"))
    beside.put_about("other")
    beside.put_round(1.8e9, {"step_max": 7})
    beside.close()
    assert get(stuck, "/jobs") == {"jobs": [JOB, "other"]}
    assert get(stuck, "/history?what=step&seconds=4e8&until=1.9e9&job=other")["step_max"] == [7]
    assert stuck.ask("GET", f"{V1}/history?job=none").status == 404


def test_recording_can_be_replayed(stuck: Running, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.write_bytes(stuck.ask("GET", f"{V1}/recording?seconds=600").body)
    again = replay(path, quick_settings())
    assert [i.kind for i in again.incidents] == ["non-communication hang"]
    assert again.incidents[0].verdict.names() == (str(HUNG),)


def test_nothing_else_is_there(stuck: Running) -> None:
    assert stuck.ask("GET", f"{V1}/nothing").status == 404
    assert stuck.ask("DELETE", f"{V1}/job").status == 405
    assert stuck.ask("GET", "/nothing").status == 404
    told = stuck.ask("GET", f"{V1}/nothing").document["error"]
    assert told["message"] == f"no such endpoint: {V1}/nothing"
    assert f"{V1}/job" in told["hint"]
    assert stuck.ask("GET", "/healthz").document == {"healthy": True}
