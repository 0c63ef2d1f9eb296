"""``ckptd kubernetes``: keeps a job's launchers in pods, beside its controller."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ckptd.cli import Document, Json, note, print_document
from ckptd.elastic.launchers import SECRET_VARIABLE
from ckptd.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from ckptd.elastic.launchers import OperatorLink
    from ckptd_kubernetes.api import Api
    from ckptd_kubernetes.launcher import KubernetesPods

__all__ = ["KubernetesDocument", "kubernetes"]

_CALL_S = 30.0
_ENDING_S = 20.0
_LOOK_S = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class KubernetesDocument(Document, frozen=True, kw_only=True, tag="kubernetes"):
    """Final output of ``ckptd kubernetes --json``.

    Attributes
    ----------
    job
        Its name.
    kind
        How the job ended; ``left`` if it goes on without this process.
    text
        What happened.
    exit_code
        Of this process.
    """

    job: str
    kind: str
    text: str
    exit_code: int


class _Signalled(Exception):
    """A signal: this process is to end, and the job is not."""

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"{name}: the job continues and waits for another one")
        # Not 0: a Job would take it for the end of all.
        self.code = 128 + number


def kubernetes(
    *words: Annotated[
        str, Parameter(help="With --template: options of ckptd run, the script, its arguments.")
    ],
    controller: Annotated[
        str, Parameter(help="HOST:PORT of ckptd controller.")
    ] = "127.0.0.1:29400",
    job: Annotated[
        str | None, Parameter(help="Name of the job; CKPTD_JOB.", show_default=False)
    ] = None,
    template: Annotated[
        str | None,
        Parameter(help="PodTemplate to make pods from, one per node.", show_default=False),
    ] = None,
    nodes: Annotated[int, Parameter(help="With --template: number of pods.")] = 1,
    selector: Annotated[
        str | None,
        Parameter(help="Labels of the pods, where a Job or JobSet makes them.", show_default=False),
    ] = None,
    wait: Annotated[float, Parameter(help="Seconds to wait for the controller.")] = 120.0,
    json: Json = False,
) -> int:
    """Keep a job's launchers in pods, as its controller wants them, until the job ends.

    Runs beside ckptd controller, in a pod whose service account may read pods and nodes and delete
    pods, and create them with --template. The controller is notified before Kubernetes takes a pod
    or node away. TERM ends this process alone: pods train on, and the next one finds them. The exit
    codes are those of ckptd run.
    """
    from ckptd_kubernetes.api import in_cluster

    name = job or os.environ.get("CKPTD_JOB") or "default"
    secret = os.environ.get(SECRET_VARIABLE, "")
    if (template is None) == (selector is None) or (selector is not None and words):
        raise UsageError(
            "give --template or --selector",
            wanted="--template NAME with what ckptd run is to start, or --selector LABELS alone",
        )
    if not secret:
        raise UsageError("the job has no secret", wanted=f"{SECRET_VARIABLE}, as in all pods")
    api = in_cluster()
    launcher = _launcher(api, name, template, nodes, selector, words)
    found = _kept(launcher, name, controller, secret.encode(), wait)
    if json:
        print_document(found)
    else:
        note(f"{found.kind}: {found.text}")
    return found.exit_code


def _launcher(
    api: Api,
    job: str,
    template: str | None,
    nodes: int,
    selector: str | None,
    words: tuple[str, ...],
) -> KubernetesPods:
    from ckptd_kubernetes.launcher import JobPods, Kubernetes, template_of

    if template is None:
        return JobPods(api, selector or "")
    made, owner = template_of(api, template, _CALL_S)

    def command(node: str) -> list[str]:
        return ["ckptd", "run", "--node", node, *words]

    names = [f"{job}-{number}" for number in range(nodes)]
    return Kubernetes(api, job, names, command, template=made, owner=owner)


def _kept(
    launcher: KubernetesPods, job: str, controller: str, secret: bytes, wait_s: float
) -> KubernetesDocument:
    """Keep the launchers until the job ends, or a signal ends this process."""
    from ckptd.elastic.launchers import OperatorLink, Supervisor, exit_code

    link = OperatorLink(lambda: controller, job, secret, name="kubernetes")
    before = {number: signal.signal(number, _raise) for number in _SIGNALS}
    try:
        _await(link, wait_s)
        outcome = Supervisor(launcher, link, _say).run()
        code = exit_code(outcome.kind, _ended(launcher))
        return KubernetesDocument(job=job, kind=outcome.kind, text=outcome.text, exit_code=code)
    except _Signalled as signalled:
        return KubernetesDocument(
            job=job, kind="left", text=str(signalled), exit_code=signalled.code
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        launcher.leave()
        link.close()


def _raise(number: int, _: FrameType | None) -> None:
    raise _Signalled(number)


def _await(link: OperatorLink, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            link.status()
        except NotFoundError:
            if time.monotonic() >= end:
                raise
        else:
            return


def _ended(launcher: KubernetesPods) -> int:
    """Wait for the launchers, which know of the end; return what the first of them failed with.

    Their pods are left where they ended, so that their logs can be read.
    """
    machines = launcher.machines(_CALL_S)
    end = time.monotonic() + _ENDING_S
    while any(m.running for m in machines) and time.monotonic() < end:
        time.sleep(_LOOK_S)
        machines = launcher.machines(_CALL_S)
    late = [m.name for m in machines if m.running]
    if late:
        launcher.stop(late, _CALL_S)
    return next((m.code for m in machines if m.code), 0)


def _say(text: str) -> None:
    print(f"ckptd: {text}", file=sys.stderr, flush=True)
