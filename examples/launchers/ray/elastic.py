"""Ray actors as elastic workers: Ray restarts one that is lost, while the others train.

    python examples/launchers/ray/elastic.py

The driver keeps the store at which the workers find each other. Ray Train is not used: it ends all
workers when one is lost.
"""

import argparse
import os
import signal
import time
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat


@ray.remote(num_cpus=1, max_restarts=3)
class Worker:
    """One worker. Ray starts another process for it if this one is lost."""

    def pid(self) -> int:
        return os.getpid()

    @ray.method(max_task_retries=-1, retry_exceptions=[offbeat.CommunicationError])
    def train(self, store: str, workers: int, epochs: int) -> str:
        """Train to the end. Ray calls this again in the new process."""
        os.environ.update(OFFBEAT_STORE=store, OFFBEAT_WORKERS=str(workers))
        torch.manual_seed(0)
        inputs = torch.randn(4096, 16)
        labels = (inputs @ torch.randn(16, 4)).argmax(1)
        data = TensorDataset(inputs[:3072], labels[:3072])
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        try:
            sync = offbeat.attach(model, optimizer)
        except offbeat.EndedError:
            return "came after the end of the training"
        first = sync.step
        sampler = offbeat.data.LeasedSampler(data, batch_size=16, sync=sync)
        loader = offbeat.data.LeasedLoader(DataLoader(data, batch_sampler=sampler))
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.02)  # a larger model
        sync.finish()
        with torch.no_grad():
            right = model(inputs[3072:]).argmax(1) == labels[3072:]
        return f"steps {first} to {sync.step}, accuracy {right.float().mean():.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on Ray actors.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--kill", type=float, help="seconds after which a worker is killed")
    options = parser.parse_args()
    ray.init(num_cpus=options.workers, include_dashboard=False)
    # The driver runs on the first machine. With several, its address must be reachable from all.
    host = ray.util.get_node_ip_address()
    store = dist.TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    workers = [Worker.remote() for _ in range(options.workers)]
    lost = ray.get(workers[-1].pid.remote())
    address = f"{host}:{store.port}"
    results = [each.train.remote(address, options.workers, options.epochs) for each in workers]
    if options.kill is not None:
        ray.wait(results, timeout=options.kill)
        os.kill(lost, signal.SIGKILL)  # as the kernel does if memory is short
    for number, result in enumerate(results):
        try:
            print(f"worker {number}: {ray.get(result)}")
        except RayActorError as error:
            print(f"worker {number}: lost too often: {error}")
    ray.shutdown()


if __name__ == "__main__":
    main()
