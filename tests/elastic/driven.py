"""A state machine to which a test hands what nodes say, and what it wants of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ckptd.elastic.control.statemachine import ControllerSettings, StateMachine
from ckptd.elastic.membership import Record
from ckptd.elastic.messages import Action, Fenced, JobEvent, NodeUp, Start, Tick
from ckptd.elastic.policy import JobSpec, Shape

JOB = JobSpec(microbatches=6, planned=Shape(dp=3))
A = TypeVar("A", bound=Action)


class Driver:
    """Hands events to a machine and remembers what it wants."""

    def __init__(
        self, names: str = "abc", records: Sequence[Record] = (), **settings: float
    ) -> None:
        self.now = 0.0
        self.machine = StateMachine(JOB, ControllerSettings(**settings), records, self.now)  # type: ignore[arg-type]
        self.actions: list[Action] = []
        self.life = dict.fromkeys(names, "1")
        self.running = dict.fromkeys(names, 0)
        self.fenced = dict.fromkeys(names, 0)

    def hear(self, event: JobEvent, after: float = 0.01) -> list[Action]:
        self.now += after
        self.actions = self.machine.handle(event, self.now)
        for action in self.actions:
            if isinstance(action, Start):
                for node in action.record.nodes:
                    self.running[node] = action.record.generation
        return self.actions

    def up(self, *names: str, after: float = 0.01) -> None:
        for name in names:
            self.hear(self.said(name), after)

    def said(self, name: str) -> NodeUp:
        return NodeUp(
            node=name,
            life=self.life[name],
            slots=1,
            running=self.running[name],
            fenced=self.fenced[name],
        )

    def all_fenced(self, *names: str) -> list[Action]:
        """Have nodes say that they have killed what they ran; return all that follows."""
        out: list[Action] = []
        for name in names:
            self.running[name], self.fenced[name] = 0, self.machine.generation
            out += self.hear(Fenced(node=name, generation=self.machine.generation))
        return out

    def pass_time(self, seconds: float, *alive: str) -> list[Action]:
        """Let time pass while these nodes beat; return what is wanted meanwhile."""
        out: list[Action] = []
        until = self.now + seconds
        while self.now < until:
            for name in alive:
                out += self.hear(self.said(name), 0.0)
            out += self.hear(Tick(), 0.5)
        return out


def one(actions: Sequence[Action], kind: type[A]) -> A:
    found = [a for a in actions if isinstance(a, kind)]
    assert len(found) == 1, actions
    return found[0]


def none(actions: Sequence[Action], kind: type[Action]) -> bool:
    return not any(isinstance(a, kind) for a in actions)


def restart(driver: Driver, *names: str) -> list[Action]:
    """Answer a fence, and return what follows."""
    return [*driver.all_fenced(*names), *driver.pass_time(2, *names)]


def with_sessions(driver: Driver, *names: str) -> None:
    """Have nodes say that their workers hold sessions."""
    for name in names:
        said = driver.said(name)
        driver.hear(
            NodeUp(**{f: getattr(said, f) for f in said.__struct_fields__} | {"sessions": True})
        )
