"""What all tests share: the long campaigns' switch, rank tests kept apart, stacks on demand."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

from ckptd.base.runtime.pauses import spare
from ckptd.testing.ranks import RANK_IMPORTS
from tests import leftovers, offspring, programs
from tests.cli.running import Cli
from tests.processes import agents_in, until
from tests.readers.opening import SAMPLES, unpack
from tests.selection import is_fast, starts_processes
from tests.writing import VARIABLE

_KEYED = (3, 14)
"""From this Python on a fork server asks for a key, which `programs.workers` does not pass on."""

# The short suite draws the same examples each time, so that CI fails for the change and not for
# the dice. Campaigns draw new ones, 40 times as many, and print what reproduces a failure. A test's
# own settings take all else of the profile that is loaded when its module is imported.
hypothesis.settings.register_profile(
    "short", deadline=None, derandomize=True, database=None, max_examples=50
)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.register_profile(
    "fast", hypothesis.settings.get_profile("short"), max_examples=15
)
hypothesis.settings.load_profile("short")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the campaigns (marker long) as well")
    parser.addoption(
        "--plugins",
        action="store_true",
        dest="frameworks",
        help="run tests with frameworks as well",
    )
    parser.addoption("--fast", action="store_true", help="run what starts no process, few cases")
    parser.addoption("--budget", action="store_true", help="fail above the budget of CPU seconds")
    parser.addoption("--costs", type=int, default=0, help="show the N files that cost most CPU")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(leftovers, leftovers.__name__)
    config.pluginmanager.import_plugin("tests.reporting")
    # `kill -QUIT PID` prints the stacks of a test process that seems stuck.
    faulthandler.register(signal.SIGQUIT, file=os.dup(2), all_threads=True)
    # What most ranks of tests import: up to half a second of CPU in each.
    RANK_IMPORTS.extend(["pytest", "hypothesis", "ckptd.monitor", "ckptd.lay.bind"])
    RANK_IMPORTS.extend(["ckptd.checkpoint.torch.checkpointer", "ckptd.elastic.torch.session"])
    RANK_IMPORTS.extend(["ckptd.reshard.torch.experts", "ckptd.publish.torch.publisher"])
    RANK_IMPORTS.append("tests.writing")
    # A shell that starts a suite in the background lets it ignore Ctrl-C, and so everything that
    # the tests start and interrupt.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    profiles = [name for name in ("long", "fast") if config.getoption(f"--{name}")]
    hypothesis.settings.load_profile(profiles[0] if profiles else "short")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Fork the workers of the run, which would each import the same: 5 s of CPU."""
    config = session.config
    forks = sys.version_info < _KEYED and config.getoption("tx", None) and not config.option.fast
    if not (forks and leftovers.leads(config)):
        return (yield)
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and not config.option.long:
        RANK_IMPORTS.append("tests.modules")
    offspring.set_wanted("all", makers={"all": programs.workers})
    try:
        return (yield)
    finally:
        offspring.close()  # a worker in place of one that crashed is an interpreter


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave alone what `--fast` would not run: importing all tests takes longer than it may."""
    path = collection_path
    if not config.getoption("--fast") or not path.name.startswith("test_"):
        return None
    return True if path.suffix == ".py" and starts_processes(path) else None


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this very hook, on its workers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        cases: Counter[str] = Counter()
        kept = {id(item) for item in items if is_fast(item, cases)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]
    skip_long = pytest.mark.skip(reason="a campaign: scripts/test --long")
    skip_plugins = pytest.mark.skip(reason="needs frameworks: scripts/test --plugins")
    for item in items:
        if config.getoption("--long") and hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.long)  # a campaign of every property
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(skip_long)
        if item.get_closest_marker("plugins") and not config.getoption("frameworks"):
            item.add_marker(skip_plugins)
        # Ranks wait for one another most of the time: two worlds at once, on two workers, by file.
        if item.get_closest_marker("dist"):
            half = zlib.crc32(item.path.name.encode()) % 2
            item.add_marker(pytest.mark.xdist_group(f"ranks{half}"))
        group = item.get_closest_marker("xdist_group")
        if group is not None and config.getoption("loadgroup", False):
            _tell_group(item, group.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Make tests and their modules, which stay to the end, the business of no collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        spare()
        gc.enable()
        gc.set_threshold(50_000, 20, 50)  # tests make many short-lived objects and few circles


class _ByFile(LoadGroupScheduling):
    """Give tests of no group to workers by file, so that one makes what a module's tests share.

    Without that, xdist sends a worker its next test when one has ended. On a busy machine the
    worker waits for it.
    """

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return scope if scope != nodeid else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)  # there is none with -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadGroupScheduling | None:
    """Let `_ByFile` schedule what is scheduled by group."""
    return _ByFile(config, log) if config.getoption("dist") == "loadgroup" else None


def _tell_group(item: pytest.Item, group: str) -> None:
    """Put the group behind the test's name, where xdist's scheduler looks for it.

    xdist 3.8 writes it to an attribute that pytest 9.2 no longer reads (pytest-xdist issue 1386),
    so that the option has no effect, without a word.
    """
    if (node_id := getattr(item, "_id", None)) is not None:
        object.__setattr__(item, "_id", type(node_id).parse(f"{item.nodeid}@{group}"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs commands in this process."""
    return Cli(capsys)


@pytest.fixture(scope="module")
def writing_thread() -> Iterator[None]:
    """Let checkpointers of a module, and of its ranks, write in a thread: see `tests.writing`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "thread")
        yield


@pytest.fixture
def writing_process(writing_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let them write in a process after all, in a test that is about it."""
    monkeypatch.delenv(VARIABLE)


@pytest.fixture(scope="session", autouse=True)
def _servers_of_forks() -> Iterator[None]:
    offspring.set_wanted("small", makers={"small": offspring.small, "all": programs.server})
    yield
    offspring.close()


@pytest.fixture(autouse=True)
def _forks(request: pytest.FixtureRequest, _servers_of_forks: None) -> Iterator[None]:
    """Have forked what the test starts with its own interpreter: see `tests.offspring`."""
    marker = request.node.get_closest_marker("forks")
    if marker is None:
        yield
    else:
        offspring.set_wanted(*marker.args)
        yield
        offspring.set_wanted("small")


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of real foreign checkpoints; readers/samples/README.md says what they are."""
    folder = tmp_path_factory.mktemp("foreign")
    for path in sorted(SAMPLES.glob("*.tar.xz")):
        unpack(path.name.removesuffix(".tar.xz"), folder)
    return folder


_run_folder_numbers = count()


@pytest.fixture(scope="session", autouse=True)
def _run_folders() -> Iterator[Path]:
    """Give a folder with a short name: paths of sockets have 107 bytes.

    Fixtures of several tests, which come before `_own_settings`, have their agents in one of it.
    """
    path = Path(tempfile.gettempdir(), os.environ.get("PYTEST_XDIST_WORKER", "gw"))
    path.mkdir(mode=0o700)
    os.environ["CKPTD_RUN_DIR"] = shared = str(path / "all")
    yield path
    _no_agent_is_left(Path(shared))
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, _run_folders: Path) -> Iterator[None]:
    """Keep the developer's ``CKPTD_*`` variables out of the tests, and tests' agents apart."""
    for name in [n for n in os.environ if n.startswith("CKPTD_")]:
        monkeypatch.delenv(name)
    own = str(_run_folders / str(next(_run_folder_numbers)))
    monkeypatch.setenv("CKPTD_RUN_DIR", own)
    yield
    folder = Path(os.environ.get("CKPTD_RUN_DIR", own))  # a test may have set another
    if folder.exists():
        _no_agent_is_left(folder)


def _no_agent_is_left(folder: Path) -> None:
    """Fail when agents of the test do not end; none outlives this."""
    with suppress(TimeoutError):
        until(lambda: not agents_in(folder), within_s=100.0)  # one waits a minute for parts
    for pid in (left := agents_in(folder)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"agents are left behind: {left}\n{logs}"
