"""What stands around every optimizer step of a worker."""

from __future__ import annotations

from tests import programs

PROGRAM = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from ckptd.elastic.torch.session import leaseguard

noted, after = [], []
leaseguard.note_step = lambda: noted.append(1)
leaseguard.note_first_step()
register_optimizer_step_post_hook(lambda *_: after.append(1))
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print(len(noted), len(after))
"""


def test_the_first_step_is_noted_beside_hooks_of_others() -> None:
    """A recorder's, say: a hook that removes itself before others fails the step that it is in."""
    run = programs.run("-c", PROGRAM)
    assert run.stdout == "1 3\n", run.stderr
