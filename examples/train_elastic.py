"""Handwritten digits on workers that may be slow, die, come back or come later.

    offbeat run --workers 4 examples/train_elastic.py

The workers share the samples of each epoch: a faster worker takes more of them.
"""

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=0.0, help="shortest time of a step")
    parser.add_argument("--slow", type=int, help="local number of a worker with half the speed")
    options = parser.parse_args()
    slow = int(os.environ.get("LOCAL_RANK", 0)) == options.slow
    shortest = options.step_ms / 1000 * (2 if slow else 1)

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train = TensorDataset(images[order[360:]], labels[order[360:]])

    model = nn.Sequential(nn.Linear(64, 350), nn.ReLU(), nn.Linear(350, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = offbeat.attach(model, optimizer, timeout_seconds=60)
    sampler = offbeat.data.LeasedSampler(train, batch_size=16, sync=sync)
    loader = offbeat.data.LeasedLoader(DataLoader(train, batch_sampler=sampler))

    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            began = time.monotonic()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, began + shortest - time.monotonic()))
    sync.finish()
    with torch.no_grad():
        right = model(images[order[:360]]).argmax(1) == labels[order[:360]]
    print(
        f"rank {sync.rank}: test accuracy {right.float().mean():.3f}, {sync.step} steps, "
        f"{sampler.repeated} samples may have been used twice"
    )


if __name__ == "__main__":
    main()
