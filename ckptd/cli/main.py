"""Entry point of ``ckptd``: table of verbs, examples, groups, errors to exit codes.

Verbs are registered by name and imported when they run, so that ``ckptd --help`` costs the parser
and nothing else. Whatever a verb raises ends here as an exit code and a readable block on standard
error (``--json``: a JSON document), never as a traceback.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

from ckptd.base.runtime.pauses import spare
from ckptd.cli.help import Rare, shown_default
from ckptd.crashes import report_crashes
from ckptd.errors import CkptdError, RefusedError, UsageError
from ckptd.parts import part
from ckptd.plugins import VERBS as VERB_GROUP
from ckptd.plugins import Verb, entries, origin
from ckptd.version import __version__

if TYPE_CHECKING:
    from ckptd.cli.output import Reply

INTERRUPTED = 130
BROKEN_PIPE = 141
_OBJECTS = 20_000

# The first paragraph is what `ckptd --help` lists, on one line of 80 columns.
VERBS = {
    "ls": "List the checkpoints of a root, the newest last.",
    "inspect": "Show what a checkpoint holds: tensors, layouts, objects, files.",
    "verify": "Check every byte; name the tensor, file and rank of any damage."
    "\n\nThe exit code is 3 when there is damage.",
    "sign": "Sign a checkpoint with a key; verify --key accepts no other."
    "\n\nKeys are PEM files: openssl genpkey -algorithm ed25519. Needs pip install 'ckptd[sign]'.",
    "diff": "Compare two checkpoints: keys, shapes, layouts, objects, values."
    "\n\nThe exit code is 0 when they are equal, 1 when they differ. Layouts are shown and do not"
    " count: the same values cut another way are equal.",
    "cp": "Copy checkpoints to another root and check digests on the way."
    "\n\nA copy that is killed leaves the target as it was; run again, it continues where it"
    " stopped. It claims a generation of the target, so a job that saves there stops with an"
    " error.",
    "export": "Write weights as Hugging Face safetensors with an index."
    "\n\nMemory stays small whatever the size of the model; no torch is needed.",
    "reshard": "Write a checkpoint of one layout as one of another."
    "\n\nLayouts are programs in Lay: files, or shipped ones. --explain shows the cost before "
    "anything is read or written. A run that was killed continues where it stopped; --shard "
    "divides the work between processes.",
    "lay": "Check, format and draw layout programs (Lay).",
    "rollback": "Make an older checkpoint the newest that counts."
    "\n\nMoves and deletes nothing. Later checkpoints no longer count, and a job that still writes "
    "here gets an error at its next save.",
    "annotate": "Add metadata to a saved checkpoint."
    "\n\nAn evaluation that ends after the save adds its result, and retention by the best uses"
    " it. A value is JSON, else text.",
    "pin": "Keep a checkpoint for ever; list pins, remove one."
    "\n\nNeither retention nor gc deletes a pinned checkpoint.",
    "tag": "Name a checkpoint: ROOT@prod; list tags, remove one."
    "\n\nA tag moves when another checkpoint gets it. A checkpoint with a tag is never deleted.",
    "gc": "Delete files that no kept checkpoint needs."
    "\n\nInterrupted saves and abandoned lines leave such files; with --keep, older steps go too. "
    "It shows a plan and asks first. It never deletes the newest complete checkpoint, anything "
    "after it, or a checkpoint that is pinned, tagged or being read.",
    "trace": "Show what each save cost and which rank was slowest.\n\nIt reads recorded events.",
    "agent": "Run, show or stop a node's agent."
    "\n\nThe agent keeps snapshots in memory for jobs with near tiers, and outlives their trainers."
    " A checkpointer starts one where none runs.",
    "serve": "Run a job's daemon: diagnosis, history, metrics, API, web page."
    "\n\nIt prints a URL with a token, which gives full access to the page and the API. TERM or "
    "INT ends it. Agents get its address from ckptd agent run --watch URL or CKPTD_DAEMON; ckptd "
    "watch does all of that for one node.",
    "controller": "Run the controller of an elastic job."
    "\n\nIt decides nodes, layout and restarts, and prints its address. It may be killed at any"
    " time and started again with the same log; training continues meanwhile. ckptd run starts one"
    " by itself.",
    "ctl": "Show the state of an elastic job; send orders to its controller.",
    "run": "Train on this node like torchrun; the job survives lost nodes."
    "\n\nOn one machine, ckptd run train.py is enough. ckptd ctl status shows the job's state."
    " --help-all adds torchrun's other options, and those about layouts and recovery.",
    "watch": "Watch an unchanged program for hangs and slow ranks."
    "\n\nStarts a daemon and an agent beside COMMAND and prints incidents as they occur. The exit"
    " code is COMMAND's; a failure of the watch never stops COMMAND.",
    "incidents": "List diagnosed incidents; show one with its evidence."
    "\n\nWithout a daemon, --history reads its history file.",
    "top": "Show a job's ranks and open incidents, live in the terminal."
    "\n\nThe ranks with the worst status come first. Ctrl-C ends it. Without a terminal it prints "
    "once.",
    "open": "Print the link to a job's web page."
    "\n\nThe job's daemon must run on this machine. The link gives full access.",
    "replay": "Run the diagnosis again over a daemon's recorded messages."
    "\n\nThe exit code is 1 when the replay shows incidents.",
    "doctor": "Probe a root's store, plugins, versions and environment."
    "\n\nIt writes to a temporary folder below ROOT and removes it again. A store without atomic "
    "create-if-absent is refused, with exit code 5. With --cluster, start it once per node before "
    "a job: it names unhealthy nodes and links.",
    "recorder": "Build the native recorder of collectives.",
}
_EXAMPLES = {
    "ls": "s3://bucket/run",
    "inspect": "s3://bucket/run@1200 --tensor 'model.layers.0.*'",
    "verify": "s3://bucket/run@1200",
    "sign": "./run@1200 --key release.pem",
    "diff": "./run@100 ./run@200 --tensor model",
    "cp": "./run@1200 s3://bucket/archive",
    "export": "./run@1200 ./release --dtype bfloat16",
    "reshard": "./run ./for-megatron --from mine.lay --to megatron.gpt --explain",
    "lay": "check mine.lay --against ./run",
    "rollback": "./run@1000",
    "annotate": "./run@1200 loss=1.25",
    "pin": "./run@1200 --reason 'for the paper'",
    "tag": "./run@1200 prod",
    "gc": "./run --keep 3 --dry-run",
    "trace": "./run/events",
    "agent": "status",
    "serve": "--job llm-7b",
    "controller": "--job llm-7b --nodes 2:4 --log /shared/llm-7b",
    "ctl": "drain n3",
    "run": "--nproc-per-node 8 train.py",
    "watch": "-- torchrun --nproc-per-node 8 train.py",
    "incidents": "--follow",
    "top": "--job llm-7b",
    "open": "--job llm-7b",
    "replay": "./recording",
    "doctor": "s3://bucket/run",
    "recorder": "build",
}
_SLICES = {
    "checkpoint": "ls inspect verify sign diff cp rollback annotate pin tag gc doctor agent",
    "reshard": "reshard export lay",
    "elastic": "run controller ctl",
    "monitor": "watch serve incidents top open replay trace recorder",
}
"""Verbs by slice: each is a module in the folder ``cli`` of its slice."""
_HOMES = {
    verb: f"ckptd.{owner}.cli.{verb}" for owner, verbs in _SLICES.items() for verb in verbs.split()
}
_FIRST = {
    verb: group
    for group, verbs in {
        Group(
            "Checkpoints", sort_key=0
        ): "ls inspect verify sign diff cp export reshard rollback annotate pin tag gc doctor",
        Group("Jobs", sort_key=1): "run watch top open incidents ctl demo",
    }.items()
    for verb in verbs.split()
}
"""Group of each verb that ``ckptd --help`` shows; ``--help-all`` shows the rest as well."""
_REST = Rare("More", sort_key=2)
_OPTIONS = Group("Options", sort_key=3)

app = App(
    name="ckptd",
    help="Checkpoints for distributed training. A checkpoint is named ROOT (the newest that "
    "counts), ROOT@STEP, or ROOT@STEP-gGENERATION; ROOT is a path or a URL."
    "\n\nckptd VERB --help says more of a verb; ckptd --help-all shows all verbs."
    "\n\nGuides are in the folder docs of the installed package; begin with start.md.",
    help_format="plaintext",
    version=__version__,
    # One spelling for each switch: no --no-json.
    default_parameter=Parameter(negative=(), show_default=shown_default),
)
_ORDER = [*_FIRST, *VERBS]
for _verb, _help in VERBS.items():
    app.command(
        f"{_HOMES[_verb]}:{_verb}",
        name=_verb,
        help=f"{_help}\n\nExample: ckptd {_verb} {_EXAMPLES[_verb]}",
        group=_FIRST.get(_verb, _REST),
        sort_key=_ORDER.index(_verb),
    )
app.command(
    "ckptd.cli.completion:install_completion",
    name="--install-completion",
    help="Install tab completion for the shell in use.",
    group=_OPTIONS,
)
app["--help"].group = app["--version"].group = (_OPTIONS,)
_LINUX = ("run", "watch", "serve", "controller", "agent run", "slurm", "kubernetes")
"""Verbs that start processes of a job: they need calls that other systems do not have."""
_HELP = (["--help"], ["--help-all"], ["-h"])
_JSON_GIVEN = {f"--json={word}" for word in ("true", "t", "yes", "y", "1", "on")}
"""Words that the parser reads as ``--json``."""


@cache
def installed_verbs() -> dict[str, Verb]:
    """Add the verbs of installed packages to `app`, and return them by name.

    Looked up only for a verb that is not one of `VERBS`, and for the list of all.
    """
    found: dict[str, Verb] = {}
    for entry in entries(VERB_GROUP):
        if entry.name in VERBS or entry.name in found:
            continue
        try:
            verb = entry.load()
            if not isinstance(verb, Verb):
                raise TypeError(f"wanted a ckptd.plugins.Verb, found {type(verb).__name__}")
        except Exception as error:  # noqa: BLE001 - one broken package leaves the other verbs
            text = f"verb {entry.name} of {origin(entry)} fails to load: {error!r}"
            print(f"note: {text}", file=sys.stderr)
            continue
        number = len(VERBS) + len(found)
        group = _FIRST.get(entry.name, _REST)
        app.command(verb.target, name=entry.name, help=verb.help, group=group, sort_key=number)
        found[entry.name] = verb
    return found


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Parameters
    ----------
    argv
        Arguments without the program's name; by default those of the process.
    """
    report_crashes()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a log shows each line as it comes
    # A tenth of the time of a short verb went into looking for cycles in what is imported.
    gc.set_threshold(_OBJECTS)
    code = run(sys.argv[1:] if argv is None else argv)
    spare()  # and the end of the process into looking for those in what goes with it
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    0 fine, 1 failed, 2 usage, 3 corrupt, 4 not found, 5 refused; 130 interrupted, 141 the reader
    of the output is gone.
    """
    argv = list(argv)
    if argv == ["--version"]:  # without what draws a help
        print(__version__)
        return 0
    if argv[:1] == ["run"]:
        argv = ["run", *part("run-words")(argv[1:])]
    if argv[:1] not in [[verb] for verb in VERBS]:
        verb = installed_verbs().get(argv[0]) if argv else None
        if verb is not None and verb.verbatim and argv[1:2] not in _HELP:
            argv = [argv[0], "--", *argv[1:]]
    end = argv.index("--") if "--" in argv else len(argv)
    Rare.shown = "--help-all" in argv[:end]
    argv[:end] = ["--help" if word == "--help-all" else word for word in argv[:end]]
    from ckptd.cli.terminal import printing

    with printing():
        return _run(argv)


def _run(argv: Sequence[str]) -> int:
    helps = not argv or not {"--help", "-h"}.isdisjoint(argv)
    app.console = None
    if helps or "--version" in argv:
        from ckptd.cli.terminal import drawing

        app.console = drawing(sys.stdout)
    as_json = any(
        word == "--json" or word.lower() in _JSON_GIVEN for word in argv if word[:6] == "--json"
    )
    try:
        if sys.platform != "linux" and not helps and " ".join(argv).startswith(_LINUX):
            raise RefusedError(
                f"ckptd {argv[0]} needs Linux",
                found=sys.platform,
                hint="checkpoints can be read, copied, converted and checked here",
            )
        reply: Reply | int | None = app(
            list(argv), exit_on_error=False, print_error=False, result_action="return_value"
        )
        if not isinstance(reply, int | None):
            reply.print(as_json=as_json)
            reply = reply.code
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(_usage(error), as_json)
    except CkptdError as error:
        return _fail(error, as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - a defect must end as a message too
        return _fail(_defect(error), as_json)
    return reply or 0


def _usage(error: CycloptsError) -> UsageError:
    chain = getattr(error, "command_chain", None) or ()
    hint = " ".join(["ckptd", *chain, "--help"])
    if isinstance(error, UnusedCliTokensError) and any(
        token.isdecimal() for token in error.unused_tokens or ()
    ):
        hint += "; steps are written ROOT@STEP"
    return UsageError(" ".join(str(error).split()), hint=hint)


def _defect(error: Exception) -> CkptdError:
    wrapped = CkptdError(
        "internal error: please report this bug of ckptd",
        found=repr(error),
        hint="CKPTD_DEBUG=1 shows the traceback",
    )
    wrapped.__cause__ = error
    return wrapped


def _fail(error: CkptdError, as_json: bool) -> int:
    from ckptd.cli.output import print_error

    print_error(error, as_json)
    return error.exit_code
