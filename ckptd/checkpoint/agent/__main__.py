"""``python -m ckptd.checkpoint.agent``: arguments with which a checkpointer starts an agent."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from contextlib import ExitStack

from ckptd.base.runtime.agentlink import AgentPlace
from ckptd.checkpoint.agent.metrics import serve_metrics
from ckptd.checkpoint.agent.node import NodeAgent, end_on_signals
from ckptd.crashes import report_crashes
from ckptd.errors import CkptdError
from ckptd.parts import part

_log = logging.getLogger("ckptd")
_METRICS = "CKPTD_AGENT_METRICS"


def main() -> None:
    """Serve on the listening socket that was passed on, until nothing is left to do."""
    report_crashes()
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--folder", required=True)
    given = parser.parse_args()
    place = AgentPlace(given.job, given.node, given.folder)
    agent = NodeAgent(socket.socket(fileno=given.fd), place)
    end_on_signals(agent)
    with ExitStack() as stack:
        if address := os.environ.get(_METRICS):
            try:
                url = stack.enter_context(serve_metrics(address, _METRICS))
                _log.info("metrics are at %s", url)
            except CkptdError as error:  # snapshots matter more
                _log.warning("metrics are not served: %s", error)
        if daemon := os.environ.get("CKPTD_DAEMON"):
            job = os.environ.get("CKPTD_JOB", "")
            try:
                stack.enter_context(part("watching")(daemon, place, job, given.folder))
            except CkptdError as error:
                _log.warning("the ranks are not watched: %s", error)
        agent.run()


if __name__ == "__main__":
    main()
