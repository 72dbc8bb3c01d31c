"""Ray Train starts the workers; the training function attaches Offbeat like any other script.

    python examples/launchers/ray/train.py

Ray makes the process group. ``ray.train.torch.prepare_model`` is left out: it would wrap the model
in DistributedDataParallel, which has nothing to do here.
"""

import tempfile
from typing import Any

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat

WORKERS = 2


def loop(settings: dict[str, Any]) -> None:
    """What every worker runs."""
    torch.manual_seed(0)
    inputs = torch.randn(2048, 16)
    labels = (inputs @ torch.randn(16, 4)).argmax(1)
    data = TensorDataset(inputs[:1536], labels[:1536])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.9)
    sync = offbeat.attach(model, optimizer, offbeat.parse_strategy(settings["strategy"]))
    for epoch in range(settings["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    sync.finish()  # from here on all workers hold the same model
    with torch.no_grad():
        right = model(inputs[1536:]).argmax(1) == labels[1536:]
    told = {"accuracy": right.float().mean().item(), "workers": sync.size}
    told["payload_bytes"] = sync.stats.payload_bytes
    with tempfile.TemporaryDirectory() as folder:  # Ray keeps metrics that come with a checkpoint
        torch.save(model.state_dict(), f"{folder}/model.pt")
        own = train.Checkpoint.from_directory(folder) if sync.rank == 0 else None
        train.report(told, checkpoint=own)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            loop,
            train_loop_config={"strategy": "local:period=8", "lr": 0.1, "epochs": 5},
            scaling_config=ScalingConfig(num_workers=WORKERS),
            torch_config=TorchConfig(backend="gloo", timeout_s=120),
            run_config=RunConfig(storage_path=folder),
        )
        ray.init(num_cpus=WORKERS)
        try:
            metrics = trainer.fit().metrics
        finally:
            ray.shutdown()
    assert metrics is not None
    print(
        f"{metrics['workers']} workers: accuracy {metrics['accuracy']:.3f}, "
        f"{metrics['payload_bytes'] / 1e3:.1f} kB sent by each"
    )


if __name__ == "__main__":
    main()
