"""Set-up of a forked worker: environment, streams, threads of BLAS, signals; runs the program.

In it: exit codes where a program is not found; how an uncaught error is shown.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib.machinery
import os
import pkgutil
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import msgspec

from ckptd.base.runtime.host import mapped_files
from ckptd.base.runtime.parent import ends_with_parent
from ckptd.decoding import msgpack_decoder
from ckptd.elastic.exitreport import first_to_say, note_end
from ckptd.elastic.launchers.zygotewire import Fork
from ckptd.elastic.messages import LEASE_VARIABLE
from ckptd.parts import part

_environs = msgpack_decoder(dict[str, str])

THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"
"""1 in the zygote, so that numpy starts no threads there."""
_MOST_BYTES = 1 << 20
_NOT_FOUND = 127
_NO_SCRIPT = 2


def die_with(parent: int, number: signal.Signals) -> None:
    """Get a signal when the thread of `parent` that started this process ends; end if it has."""
    ends_with_parent(number)
    if os.getppid() != parent:
        os._exit(1)


def become(order: Fork, given: int, commands: bool) -> Callable[[], None]:
    """Become what `order` says, as far as that can be done here; return the rest of it.

    Parameters
    ----------
    order, given
        The order, and the descriptor that came with it.
    commands
        Whether nothing may be run in this fork itself.
    """
    os.setsid()
    _redirect(order)
    if order.mode == "store":
        return partial(_serve_store, order, given, commands)
    plain = commands or order.mode == "exec"
    if not plain and order.mode == "script" and _hidden_by_us(order.argv[0]):
        plain = True
    if not plain:
        _set_environment(order.environ)
        _load_backends()
    environ = order.environ | _rest(given)
    if plain:
        _run_command(_command(order), environ)
    _set_environment(environ)
    _as_new(environ)
    _watch(environ)
    _guard(environ.get(LEASE_VARIABLE))
    module, once = order.mode == "module", not order.stderr
    return partial(run_program, order.argv, module=module, once=once)


def _redirect(order: Fork) -> None:
    for fd, path in ((1, order.stdout), (2, order.stderr)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, fd)
            os.close(file)


def _rest(given: int) -> dict[str, str]:
    """Return the environment that is known only now; end without one: the launcher wants us not."""
    with open(given, "rb") as gate:
        raw = gate.read(_MOST_BYTES)
    try:
        return _environs.decode(raw)
    except msgspec.MsgspecError:
        os._exit(1)


def _set_environment(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def _command(order: Fork) -> Sequence[str]:
    before: dict[str, tuple[str, ...]] = {
        "script": (sys.executable, "-u"),
        "module": (sys.executable, "-u", "-m"),
    }
    return (*before.get(order.mode, ()), *order.argv)


def _run_command(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and so by its children
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), dict(environ))
    except OSError as error:
        sys.stderr.write(f"ckptd: {argv[0]}: {error.strerror}\n")
        os._exit(_NOT_FOUND)


def _serve_store(order: Fork, given: int, commands: bool) -> None:
    if commands:
        os.set_inheritable(given, True)
        code = "from ckptd.elastic.torch.session.zygote_store import main; import sys; "
        code += "main(*sys.argv[1:])"
        _run_command((sys.executable, "-c", code, order.argv[0], str(given)), order.environ)
    from ckptd.elastic.torch.session.zygote_store import main

    main(order.argv[0], str(given))


# --- a process like any other ---------------------------------------------------------------------


def _hidden_by_us(script: str) -> bool:
    """Whether a module beside `script` has a name that the zygote has imported from elsewhere."""
    folder = os.path.dirname(os.path.realpath(script))
    loaded = {name for name in sys.modules if "." not in name}
    with suppress(OSError):
        names = {entry.partition(".")[0] for entry in os.listdir(folder)}
        for name in (names & loaded) - {"__main__", "__pycache__"}:
            at = getattr(sys.modules[name], "__file__", None)
            if _is_module(os.path.join(folder, name)) and not (at or "").startswith(folder):
                return True
    return False


def _is_module(stem: str) -> bool:
    ends = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
    package = os.path.isdir(stem) and os.path.exists(os.path.join(stem, "__init__.py"))
    return package or any(os.path.exists(stem + end) for end in ends)


def _load_backends() -> None:
    """Do what `import torch` does in a process of its own; the zygote has left it out."""
    torch = sys.modules["torch"]
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()


def _as_new(environ: Mapping[str, str]) -> None:
    """Undo what makes forks alike."""
    random = getattr(sys.modules.get("numpy"), "random", None)
    if random is not None:
        random.seed()
    sys.modules["torch"].default_generator.seed()
    _set_blas_threads(environ)


def _watch(environ: Mapping[str, str]) -> None:
    """Begin to record where the rank is known now: it was not when the backends were loaded.

    Else it would be seen only after it has joined its group, and never if it is stopped before.
    """
    if environ.get("RANK") and sys.modules["torch"]._is_device_backend_autoload_enabled():
        part("recorder")()


def _guard(lease: str | None) -> None:
    """Have every optimizer look at the lease, also in programs that know nothing of ckptd."""
    if lease:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from ckptd.elastic.lease import WorkerLease
        from ckptd.elastic.torch.session.leaseguard import end_if_over, note_first_step

        note_first_step()
        mine = WorkerLease(lease)
        register_optimizer_step_pre_hook(lambda *_: end_if_over(mine))


def _set_blas_threads(environ: Mapping[str, str]) -> None:
    """Give numpy the threads that it would have taken."""
    words = [environ.get(n, "") for n in (THREADS_VARIABLE, "GOTO_NUM_THREADS", "OMP_NUM_THREADS")]
    number = next((int(w) for w in words if w.isdecimal() and int(w)), None)
    number = number or len(os.sched_getaffinity(0))
    if number == 1:
        return
    for path in {path for path in mapped_files() if "openblas" in path}:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_"):
            with suppress(AttributeError):
                getattr(library, name)(number)
                break


# --- the program ----------------------------------------------------------------------------------


def run_program(argv: Sequence[str], *, module: bool, once: bool = False) -> None:
    """Run a program as ``python -u [-m] ARGV...`` would; its end is that of this process.

    Parameters
    ----------
    argv
        Its file, or name with `module`, and its arguments.
    once
        Whether other ranks write to the same place: an error that all have is shown once then.
    """
    # What the zygote was started by has put one entry at the end, from where ckptd came.
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if module else []), *argv]
    sys.argv = list(argv)
    sys.modules["__main__"] = main = _new_main()
    try:
        if module:
            _set_first(os.getcwd())
            sys.argv[0] = "-m"
            runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]
        elif os.path.isdir(argv[0]) or _is_archive(argv[0]):
            _set_first(argv[0], always=True)
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            _set_first(os.path.dirname(os.path.realpath(argv[0])))
            exec(_code(argv[0], main.__dict__), main.__dict__)
        note_end(None)
    except SystemExit as error:
        note_end(_ours_removed(error))
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        _tell_uncaught(error, once=once)
        if isinstance(error, KeyboardInterrupt):
            _end_by_interrupt()
        sys.exit(1)


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    return main


def _set_first(folder: str, always: bool = False) -> None:
    if always or not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _is_archive(path: str) -> bool:
    with suppress(ImportError):
        return os.path.isfile(path) and pkgutil.get_importer(path) is not None
    return False


def _code(script: str, into: dict[str, Any]) -> types.CodeType:
    path = os.path.join(os.getcwd(), script)
    into.update(
        __file__=path,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: {error}\n")
        sys.exit(_NO_SCRIPT)
    return compile(source, path, "exec", dont_inherit=True)


def _ours_removed(error: BaseException) -> BaseException:
    """Return the error without the frames of this module, which come first."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


def _tell_uncaught(error: BaseException, *, once: bool) -> None:
    error = _ours_removed(error)
    trace = error.__traceback__
    note_end(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    usual = once and sys.excepthook is sys.__excepthook__
    if usual and not first_to_say("".join(traceback.format_exception(error))):
        return
    try:
        sys.excepthook(type(error), error, trace)
    except Exception:  # noqa: BLE001 - a hook of the program; the interpreter shows both as well
        traceback.print_exc()
        sys.__excepthook__(type(error), error, trace)


def _end_by_interrupt() -> NoReturn:
    """End as the interpreter does after an uncaught Ctrl-C: by the signal, after all else."""
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt
