"""Dashboards and alerts: they parse, ask for metrics that exist, and a real Prometheus scrapes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptd.monitor.daemon.metrics import NAMES
from ckptd.monitor.verdict import VerdictKind
from tests.processes import PATIENCE_S, free_port

ROOT = Path(__file__).parents[3]
DASHBOARDS = ROOT / "docs" / "dashboards"
ALERTS = DASHBOARDS / "alerts.yml"
TESTS = DASHBOARDS / "alerts.test.yml"
METRIC = re.compile(r"\bckptd_\w+")
SERIES_OF_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def installed(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"NOT TESTED: {tool} is not installed (Debian: apt install prometheus)")
    return path


def dashboard() -> Any:
    return json.loads((DASHBOARDS / "ckptd.json").read_text())


def panels() -> list[Any]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """Return what panels and annotations ask for, with values for Grafana's variables."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [a["expr"] for a in dashboard()["annotations"]["list"]]
    return [e.replace("$instance", ".*").replace("$__rate_interval", "5m") for e in found]


def rules() -> list[Any]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def documented() -> set[str]:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    return set(re.findall(r"`(ckptd_\w+)", page))


def promtool(*args: str) -> str:
    done = subprocess.run(
        [installed("promtool"), *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=DASHBOARDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- what they ask for -----------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["panels", "alerts"])
def test_every_metric_exists(of: str) -> None:
    asked = expressions() if of == "panels" else [rule["expr"] for rule in rules()]
    known = set(NAMES) | documented()
    names = {name for text in asked for name in METRIC.findall(text)}
    unknown = {name for name in names if not {name, SERIES_OF_HISTOGRAM.sub("", name)} & known}
    assert names
    assert not unknown, "neither the daemon nor a checkpointer exports these"


def test_every_metric_of_the_daemon_is_shown() -> None:
    shown = {SERIES_OF_HISTOGRAM.sub("", m) for e in expressions() for m in METRIC.findall(e)}
    assert not set(NAMES) - shown, "no panel shows these"


def test_panels_are_whole_and_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(numbers) == len(set(numbers))
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken[x, y])
                taken[x, y] = panel["title"]
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}", "a user chooses the source"
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_every_alert_says_what_to_do_and_is_tested() -> None:
    tested = {
        case["alertname"]
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in {"critical", "warning"}
    assert tested == {rule["alert"] for rule in rules()}


def test_classes_of_alerts_are_those_of_verdicts() -> None:
    named = re.findall(r'class=~?"([^"]+)"', ALERTS.read_text())
    classes = {name for text in named for name in text.split("|")}
    assert classes == {str(kind) for kind in VerdictKind} - {str(VerdictKind.CANNOT_SAY)}


# -- what Prometheus says --------------------------------------------------------------------------


def test_promtool_takes_the_alerts() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS))


def test_promtool_runs_the_tests_of_the_alerts() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(TESTS))


def test_promtool_parses_what_panels_ask_for(tmp_path: Path) -> None:
    recorded = [{"record": f"panel:{k}", "expr": e} for k, e in enumerate(expressions())]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    assert f"SUCCESS: {len(recorded)} rules" in promtool("check", "rules", str(path))


def test_the_tests_of_the_alerts_can_fail(tmp_path: Path) -> None:
    installed("promtool")
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text().replace("> 1.2", "> 99"))
    (tmp_path / "alerts.test.yml").write_text(TESTS.read_text())
    command = ["promtool", "test", "rules", "alerts.test.yml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert done.returncode != 0
    assert "CkptdStraggler" in done.stdout + done.stderr


# -- a real Prometheus -----------------------------------------------------------------------------


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[str]:
    """Give ``host:port`` of a daemon that shows a simulated job."""
    installed("prometheus")
    code = "from ckptd.cli.main import main; main()"
    options = ["--simulate", "16", "--history", str(tmp_path / "history.sqlite"), "--json"]
    command = [sys.executable, "-c", code, "serve", *options]
    said, log = tmp_path / "said", tmp_path / "daemon.log"
    with (
        open(said, "w") as out,
        open(log, "w") as err,
        running(command, stdout=out, stderr=err) as process,
    ):
        end = time.monotonic() + PATIENCE_S
        while not said.read_text().rstrip().endswith("}"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield str(json.loads(said.read_text())["url"]).removeprefix("http://")


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes `target` each second, with our alerts; give its URL."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "ckptd", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        installed("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        open(folder / "prometheus.log", "w") as log,
        running(command, stdout=log, stderr=log),
    ):
        yield f"http://127.0.0.1:{port}"


def asked(url: str, query: str) -> Any:
    """Return Prometheus's answer to a query."""
    request = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)


def until_answered(url: str, query: str, end: float, log: Path) -> None:
    """Wait until some series answers a query."""
    while True:
        assert time.monotonic() < end, f"no answer to {query}\n{log.read_text()[-3000:]}"
        try:
            if asked(url, query)["data"]["result"]:
                return
        except urllib.error.HTTPError as error:
            if error.code != 503:  # it says so until it is ready
                raise
        except (urllib.error.URLError, ConnectionError):
            pass  # it does not listen yet
        time.sleep(0.2)


MAIN = [
    'up{job="ckptd"} == 1',
    "ckptd_world_size == 16",
    'sum(ckptd_ranks) == 16 and sum(ckptd_ranks{status="ok"}) > 0',
    'ckptd_step{of="first"} > 0',
    "count(ckptd_rank_heartbeat_age_seconds) == 16",
    "count(ckptd_rank_progress_age_seconds) == 16",
    "sum by (group_kind) (ckptd_collectives_total) > 0",
    "min(ckptd_agent_up) == 1",
    "ckptd_round_cpu_seconds > 0",
    "ckptd_messages_total > 0",
]


def test_a_real_prometheus_scrapes_the_daemon(daemon: str, tmp_path: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    with prometheus(daemon, tmp_path) as url:
        for query in MAIN:
            until_answered(url, query, end, tmp_path / "prometheus.log")
        for expression in expressions():
            assert asked(url, expression)["status"] == "success"
        with urllib.request.urlopen(f"{url}/api/v1/rules", timeout=PATIENCE_S) as reply:
            groups = json.load(reply)["data"]["groups"]
        loaded = {rule["name"] for group in groups for rule in group["rules"]}
        assert loaded == {rule["alert"] for rule in rules()}
