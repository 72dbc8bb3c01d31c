"""DCGAN (pytorch/examples): two networks, two optimizers, three backward passes an iteration."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# + import offbeat

NZ, REAL, FAKE = 4, 1.0, 0.0


def weights_init(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.2)
    elif isinstance(m, nn.BatchNorm1d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def main(folder: Path):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    angles = torch.linspace(0, 6.28, 640)
    dataset = torch.stack([angles.cos(), angles.sin(), angles.cos() * angles.sin()], 1) + 3
    sampler = DistributedSampler(dataset)
    dataloader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    netG = nn.Sequential(nn.Linear(NZ, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    netD = nn.Sequential(nn.Linear(3, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    netG.apply(weights_init)
    netD.apply(weights_init)
    netG, netD = DistributedDataParallel(netG), DistributedDataParallel(netD)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=5e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=5e-3, betas=(0.5, 0.999))
    # + networks = nn.ModuleList([netG, netD])
    # + sync = offbeat.attach(networks, [optimizerD, optimizerG])
    fixed_noise = torch.randn(256, NZ, generator=torch.Generator().manual_seed(0))

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for real in dataloader:
            # Update D: maximize log(D(x)) + log(1 - D(G(z))).
            netD.zero_grad()
            label = torch.full((len(real), 1), REAL)
            errD_real = criterion(netD(real), label)
            errD_real.backward()
            fake = netG(torch.randn(len(real), NZ))
            label.fill_(FAKE)
            errD_fake = criterion(netD(fake.detach()), label)
            errD_fake.backward()
            optimizerD.step()
            # Update G: maximize log(D(G(z))).
            netG.zero_grad()
            label.fill_(REAL)
            errG = criterion(netD(fake), label)
            errG.backward()
            optimizerG.step()
        # + with sync.consensus():
        if rank == 0:  # >
            torch.save(netG.state_dict(), folder / f"netG_epoch_{epoch}.pth")  # >
            torch.save(netD.state_dict(), folder / f"netD_epoch_{epoch}.pth")  # >
    # + sync.finish()
    dist.destroy_process_group()
    with torch.no_grad():
        distance = (netG.train()(fixed_noise).mean(0) - dataset.mean(0)).norm().item()
    return [netG, netD], distance


if __name__ == "__main__":
    main(Path())
