"""The trainer's side: each rank publishes what it has; rank 0 leads vLLM through the phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import nn
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
)

import ckptd
from ckptd.errors import DeadlineError, UsageError
from ckptd_vllm import BACKEND

__all__ = ["CkptdTrainerInitInfo", "CkptdTrainerWeightTransferEngine"]


@dataclass
class CkptdTrainerInitInfo(TrainerInitInfo):
    """Arguments of every rank of the trainer; `rank` is its number among them.

    Attributes
    ----------
    layout
        How the trainer's ranks hold the model; see `ckptd.Publisher`.
    at
        Where vLLM's workers find the publisher; see `ckptd.Publisher`.
    worker
        The rest of `ckptd_vllm.worker.CkptdInitInfo`: `layout` of vLLM's ranks at least.
    publisher
        Further options of `ckptd.Publisher`.
    wait_s
        Longest wait for a slot that workers still hold, in seconds.
    """

    backend: ClassVar[str] = BACKEND

    layout: Any
    at: str
    worker: Mapping[str, Any]
    publisher: Mapping[str, Any] = field(default_factory=dict)
    wait_s: float = 300.0


class CkptdTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """Publishes a trainer's weights, and has vLLM take each version.

    Attributes
    ----------
    publisher
        Of this rank; its `before_mutation` is for changes that no optimizer makes.
    """

    init_info_cls = CkptdTrainerInitInfo

    publisher: ckptd.Publisher
    _step = 0
    _wait_s = 300.0

    @classmethod
    def trainer_init(cls, init_info: CkptdTrainerInitInfo, *, client: Any, source: Any) -> Self:
        """Begin, on every rank.

        Parameters
        ----------
        init_info
            Of this rank.
        client
            Leads vLLM; used by rank 0 alone.
        source
            The model, or a state as `ckptd.Publisher.publish` takes it: with the optimizer, only
            its next step waits for the copy. Nothing is gathered, so it is no `WeightSource`.

        Raises
        ------
        UsageError
            `source` is neither.
        """
        state = {"model": source} if isinstance(source, nn.Module) else source
        if not isinstance(state, Mapping):
            raise UsageError(
                "the source must be a module or a state, as each rank publishes its own part",
                wanted='the model, or {"model": model, "optim": optimizer}',
                found=type(source).__name__,
            )
        engine = cls(client=client, source=state, is_sender=init_info.is_sender)
        engine._wait_s = init_info.wait_s
        engine.publisher = ckptd.Publisher(init_info.layout, init_info.at, **init_info.publisher)
        if engine.is_sender:
            client.init_weight_transfer_engine({"at": init_info.at, **init_info.worker})
        return engine

    def send_weights(self, step: int | None = None) -> None:
        """Publish the weights, and wait on rank 0 until vLLM has them. Every rank calls it.

        Parameters
        ----------
        step
            What workers see as the version's step; one more than the last when None.

        Raises
        ------
        DeadlineError
            kind ``no-version``: workers hold all slots for too long.
        """
        self._step = self._step + 1 if step is None else step
        publication = self.publisher.publish(self._step, self.source, wait_s=self._wait_s)
        if publication.skipped:  # on all ranks alike
            raise DeadlineError(
                "the weights could not be published",
                kind="no-version",
                wanted=f"a free slot within {self._wait_s:.0f} s",
                found=publication.skipped,
            )
        if self.is_sender:
            self.client.start_weight_update()
            number, epoch = publication.number, self.publisher.epoch
            self.client.update_weights({"number": number, "epoch": epoch})
            self.client.finish_weight_update(str(self._step))

    def shutdown(self) -> None:
        """End the publisher."""
        self.publisher.close()
