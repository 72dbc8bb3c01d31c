"""Handwritten digits, trained by several processes that rarely talk to each other.

    torchrun --nproc-per-node 2 examples/train_selsync.py

An ordinary torch.distributed script. The import and the two lines marked "Offbeat" are added to it.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train = TensorDataset(images[order[360:]], labels[order[360:]])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = offbeat.attach(model, optimizer, offbeat.SelSync(target_lssr=0.9))  # Offbeat

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    sync.finish()  # Offbeat: from here on all processes hold the same model
    model.eval()
    with torch.no_grad():
        right = model(images[order[:360]]).argmax(1) == labels[order[:360]]
    stats = sync.stats
    print(
        f"rank {sync.rank}: test accuracy {right.float().mean():.3f}, {stats.steps} steps, "
        f"{stats.local_steps} of them local, {stats.payload_bytes / 1e6:.1f} MB sent"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
