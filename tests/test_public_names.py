"""The public names are a promise, and torch is not part of what they cost."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ckptd
from tests.processes import PATIENCE_S

ROOT = Path(__file__).parents[1]

NAMES = [
    "Auto",
    "Batches",
    "Checkpointer",
    "CkptdError",
    "ConflictError",
    "CopyOptions",
    "CorruptError",
    "DeadlineError",
    "Every",
    "ExpertMove",
    "ExpertPrice",
    "Keep",
    "LoadReport",
    "Local",
    "Memory",
    "MismatchError",
    "NotFoundError",
    "Peer",
    "PerRank",
    "Preemption",
    "ProcessError",
    "Publisher",
    "RefusedError",
    "Rng",
    "SaveError",
    "SaveHandle",
    "Storage",
    "StoreError",
    "Subscriber",
    "TransientStoreError",
    "UsageError",
    "__version__",
    "move_experts",
    "register",
    "relayout",
    "with_expert_placement",
]

FROM_TRAIN = [
    "Auto",
    "Batches",
    "Checkpointer",
    "Every",
    "Keep",
    "LoadReport",
    "PerRank",
    "Rng",
    "SaveHandle",
]

TORCH_FREE = [
    "ckptd",
    "ckptd.checkpoint.agent",
    "ckptd.cli.main",
    "ckptd.errors",
    "ckptd.events",
    "ckptd.checkpoint.format",
    "ckptd.base.grids",
    "ckptd.checkpoint.load",
    "ckptd.monitor",
    "ckptd.readers",
    "ckptd.reshard.live",
    "ckptd.publish.server",
    "ckptd.reshard",
    "ckptd.checkpoint.root",
    "ckptd.base.runtime",
    "ckptd.checkpoint.save",
    "ckptd.store",
    "ckptd.testing",
    "ckptd.checkpoint.tools",
    "ckptd.types",
]


def test_public_names() -> None:
    assert ckptd.__all__ == NAMES
    assert dir(ckptd) == sorted(NAMES)


def test_no_module_hides_a_public_name() -> None:
    # Importing a submodule makes it an attribute of its package, in place of the name.
    folder = Path(ckptd.__file__).parent
    assert not {p.stem for p in folder.iterdir()} & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ckptd, name) is not None


@pytest.mark.parametrize("name", FROM_TRAIN)
def test_names_of_the_core_are_imported_from_where_they_are(name: str) -> None:
    assert getattr(ckptd, name).__module__ == ckptd._HOMES[name]


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Chekpointer'"):
        _ = ckptd.Chekpointer  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_import_without_torch(module: str) -> None:
    heavy = python(
        f"import sys, {module}; print({{'torch', 's3fs', 'matplotlib'}} & {{*sys.modules}})"
    )
    assert heavy.stdout.strip() == "set()"


def test_what_most_programs_do_without_is_not_imported(tmp_path: Path) -> None:
    told = "print(*sorted({*sys.modules} - old)); "
    code = "import sys, torch; old = {*sys.modules}; import ckptd; ckptd.Checkpointer; " + told
    code += f"ck = ckptd.Checkpointer({str(tmp_path)!r}); {told}"
    code += f"saved = ck.save(1, {{'w': torch.ones(3)}}); {told} saved.durable(); ck.close()"
    done = python(code)
    touched, made, saved = (line.split() for line in done.stdout.splitlines())
    assert "ckptd.checkpoint.torch.checkpointer" in touched, done.stderr
    # What saves is imported while the writing process starts, and what loads by a load.
    assert len(touched) <= 80, touched
    assert "ckptd.checkpoint.torch.saver" not in touched
    assert "ckptd.checkpoint.torch.saver" in made
    assert saved == made, "training waits for what a first save imports"
    assert len(saved) <= 145, saved
    # DTensor takes longer than all of ckptd; Lay is a quarter of it; the worker is a process.
    above = ["ckptd.elastic", "ckptd.monitor", "ckptd.readers", "ckptd.reshard", "ckptd.lay"]
    later = ["ckptd.checkpoint.torch.loader", "ckptd.checkpoint.torch.data", "ckptd.publish"]
    for name in ("torch.distributed.", "ckptd.checkpoint.save.writer", "sympy", *above, *later):
        assert not [b for b in saved if b.startswith(name)]


def test_a_load_imports_little_besides(tmp_path: Path) -> None:
    """numpy's masks and psutil took 25 ms of each new process, and each dataclass 0.35 ms."""
    torch = pytest.importorskip("torch")
    with ckptd.Checkpointer(tmp_path) as ck:
        ck.save(1, {"w": torch.ones(8)})
    done = python(
        "import sys, dataclasses, torch; made, real = [], dataclasses._process_class\n"
        "def counted(cls, *more, **named):\n"
        "    made.append(cls.__name__)\n"
        "    return real(cls, *more, **named)\n"
        "dataclasses._process_class = counted\n"
        f"import ckptd; ckptd.Checkpointer({str(tmp_path)!r}).load({{'w': torch.zeros(8)}})\n"
        "print(*sys.modules); print(*made)"
    )
    modules, made = (line.split() for line in done.stdout.splitlines()[-2:])
    assert not {"numpy.ma", "psutil"} & {*modules}, done.stderr
    assert "Capabilities" in made
    assert len(made) <= 10, made


def test_the_writing_process_imports_what_it_writes_with() -> None:
    done = python("import sys, ckptd.checkpoint.save.writer; print(*sys.modules)")
    brought = done.stdout.split()
    assert "ckptd.checkpoint.save.drain" in brought, done.stderr
    assert len([name for name in brought if name.startswith("ckptd")]) <= 63
    for name in ("torch", "importlib.metadata", "email", "zoneinfo", "zstandard", "psutil"):
        assert name not in brought


@pytest.mark.parametrize(
    ("package", "use", "extra"),
    [
        ("torch", "import ckptd; ckptd.Checkpointer", "train"),
        ("zarr", "import ckptd_zarr", "zarr"),
    ],
)
def test_without_a_package_the_missing_extra_is_named(package: str, use: str, extra: str) -> None:
    # None in sys.modules is how Python itself says that a module cannot be imported.
    done = python(f"import sys; sys.modules[{package!r}] = None; {use}")
    assert f"pip install 'ckptd[{extra}]'" in done.stderr


def test_version_from_the_command_line() -> None:
    done = python("from ckptd.cli.main import main; main(['--version'])")
    assert (done.returncode, done.stdout.strip()) == (0, ckptd.__version__)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


IMPORT = re.compile(r"(?m)^ *from (ckptd[\w.]*) import (\([^)]*\)|[\w, ]*)")


def is_there(module: str, name: str) -> bool:
    try:
        found = hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ckptd"):
            raise
        # A plugin whose framework is not installed: what it says of itself.
        spec = find_spec(module)
        found = spec is not None and f'"{name}"' in Path(spec.origin or "").read_text()
    return found or find_spec(f"{module}.{name}") is not None


def test_what_the_pages_import_is_there() -> None:
    missing = []
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    for page in (p for p in pages if p.parent.name != "changes"):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for name, words in IMPORT.findall(block):
                wanted = re.findall(r"(\w+)(?: as \w+)?", words)
                missing += [f"{page.name}: {name}.{w}" for w in wanted if not is_there(name, w)]
    assert not missing
