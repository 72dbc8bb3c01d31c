"""LocalSGD and DiLoCo of the package torchft, as references.

torchft coordinates *replica groups* of workers. Each group has a *manager*. The *lighthouse*, a
server, tells the managers which groups take part. Here every worker is a separate replica group.
"""

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from offbeat import CommunicationError
from offbeat.extend import setting
from offbeat_lab.evaluation import gather
from offbeat_lab.methods.peer import Peer, TrainingLoop, worker_address
from offbeat_lab.recipes import Task


@dataclass(frozen=True, kw_only=True)
class TorchftLocalSGD(Peer):
    """Local SGD of torchft.

    Args:
        period: Number H of steps between two averages of the models (≥ 1). torchft's name is
            ``sync_every``.
    """

    name: ClassVar[str] = "torchft:localsgd"
    package: ClassVar[str] = "torchft"
    needs_cpu: ClassVar[bool] = True
    period: int = setting(least=1)

    @override
    def loop(self, task: Task, timeout_seconds: float) -> TrainingLoop:
        from torchft.local_sgd import LocalSGD

        group = Group(timeout_seconds)
        method = LocalSGD(group.manager, task.model, task.optimizer, self.period)
        return _Managed(self.name, task, group, method)


@dataclass(frozen=True, kw_only=True)
class TorchftDiLoCo(Peer):
    """DiLoCo of torchft. The outer optimizer is SGD.

    Args:
        period: Number H of steps between two synchronizations (≥ 1). torchft's name is
            ``sync_every``.
        outer_lr: Learning rate of the outer optimizer (> 0).
        outer_momentum: Nesterov momentum of the outer optimizer, in [0, 1). 0: no momentum.
    """

    name: ClassVar[str] = "torchft:diloco"
    package: ClassVar[str] = "torchft"
    needs_cpu: ClassVar[bool] = True
    period: int = setting(least=1)
    outer_lr: float = setting(0.7, above=0)
    outer_momentum: float = setting(0.9, least=0, below=1)

    @override
    def loop(self, task: Task, timeout_seconds: float) -> TrainingLoop:
        from torchft.local_sgd import DiLoCo

        group = Group(timeout_seconds)
        outer = torch.optim.SGD(
            task.model.parameters(),
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            nesterov=self.outer_momentum > 0,
        )
        method = DiLoCo(
            group.manager,
            [task.model],
            task.optimizer,
            [outer],
            sync_every=self.period,
            use_bucketization=True,  # one operation for all parameters, not one for each
        )
        return _Managed(self.name, task, group, method)


class Group:
    """torchft's servers on this worker: a store, a manager, and on rank 0 the lighthouse.

    Creating it is a collective. torchft can continue after a failed all-reduce. Here that is an
    error, because all runs of a comparison must train with all workers.
    """

    def __init__(self, timeout_seconds: float) -> None:
        logging.getLogger("torchft").setLevel(logging.WARNING)
        from torchft.coordination import LighthouseServer
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        rank, size = dist.get_rank(), dist.get_world_size()
        limit = timedelta(seconds=timeout_seconds)
        host = worker_address()
        self._lighthouse: Any = None
        address = ""
        if rank == 0:
            self._lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=size)
            address = f"http://{host}:{self._lighthouse.address().rpartition(':')[2]}"
        address = gather(address, torch.device("cpu"), "the address of torchft's lighthouse")[0]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # missing in the stubs
            host, 0, is_master=True, wait_for_workers=False, timeout=limit
        )
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            load_state_dict=lambda state: None,  # no worker ever needs another's state
            state_dict=dict,
            min_replica_size=size,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            connect_timeout=limit,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=address,
            replica_id=f"worker{rank}",
            hostname=host,
            init_sync=False,  # all workers start with the same model
            max_retries=0,
        )

    def require_all_workers(self) -> None:
        """Raise CommunicationError if the last all-reduce failed on this worker."""
        error = self.manager.errored()
        if error is not None:
            raise CommunicationError(
                f"rank {dist.get_rank()}: torchft reported {error.original_exception}; its runs "
                "here need all workers, and each operation at most the seconds of --timeout"
            )

    def close(self) -> None:
        """Shut down all managers, and then the lighthouse on rank 0. A collective."""
        gather(None, torch.device("cpu"), "the end of torchft's managers")
        self.manager.shutdown(wait=False)
        gather(None, torch.device("cpu"), "the end of torchft's lighthouse")
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


class _Managed(TrainingLoop):
    """Training loop of a torchft method, which acts in hooks of the optimizer's step."""

    def __init__(self, name: str, task: Task, group: Group, method: Any) -> None:
        super().__init__(name, task, task.model, differ=True)
        self._group, self._method = group, method
        method.__enter__()

    @override
    def _optimize(self) -> None:
        try:
            super()._optimize()
        except RuntimeError:
            # If an all-reduce failed, raise an error with the cause. torchft's has only a count.
            self._group.require_all_workers()
            raise
        self._group.require_all_workers()

    @override
    def _close(self) -> None:
        self._method.__exit__(None, None, None)
        self._group.close()
