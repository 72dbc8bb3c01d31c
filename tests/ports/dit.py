"""DiT's train.py (facebookresearch/DiT): a frozen EMA copy, and files of rank 0 in the loop."""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# + import offbeat


class Denoiser(nn.Module):
    """Predicts the noise in eight numbers at a time from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 32)
        self.into, self.out = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.silu(self.into(x) + self.time(t)))


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float = 0.9) -> None:
    for ema_p, p in zip(ema.parameters(), model.parameters(), strict=True):
        ema_p.mul_(decay).add_(p, alpha=1 - decay)


def loss_of(model: nn.Module, x: torch.Tensor, generator: torch.Generator | None = None):
    noise = torch.randn(x.shape, generator=generator)
    t = torch.rand(len(x), 1, generator=generator)
    return nn.functional.mse_loss(model((1 - t) * x + t * noise, t), noise)


def main(folder: Path):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7 * size + rank)

    model = Denoiser()
    ema = copy.deepcopy(model)  # of other initial values on each rank, until the update below
    for p in ema.parameters():
        p.requires_grad = False
    model = DistributedDataParallel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    # + sync = offbeat.attach(model, opt)

    angles = torch.arange(640.0)[:, None] * torch.arange(1, 9)
    dataset = angles.sin() + 1
    sampler = DistributedSampler(dataset, size, rank, shuffle=True, seed=7)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)

    update_ema(ema, model.module, decay=0)
    model.train()
    ema.eval()
    train_steps, log_steps, running_loss = 0, 0, 0.0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in loader:
            loss = loss_of(model, x)
            opt.zero_grad()
            loss.backward()
            opt.step()
            update_ema(ema, model.module)
            running_loss += loss.item()
            log_steps, train_steps = log_steps + 1, train_steps + 1
            if train_steps % 10 == 0:
                avg_loss = torch.tensor(running_loss / log_steps)
                dist.all_reduce(avg_loss)  # -
                avg_loss /= size  # -
                # + avg_loss = sync.mean(avg_loss)
                if rank == 0:
                    print(f"(step={train_steps:07d}) Train Loss: {avg_loss.item():.4f}")
                log_steps, running_loss = 0, 0.0
            if train_steps % 20 == 0:
                # + with sync.consensus(also=[ema]):
                if rank == 0:  # >
                    checkpoint = {  # >
                        "model": model.module.state_dict(),  # >
                        "ema": ema.state_dict(),  # >
                        "opt": opt.state_dict(),  # >
                    }  # >
                    torch.save(checkpoint, folder / f"{train_steps:07d}.pt")  # >
                dist.barrier()  # -
    # + sync.finish(also=[ema])
    model.eval()
    dist.destroy_process_group()
    with torch.no_grad():
        loss = loss_of(ema, dataset, torch.Generator().manual_seed(0)).item()
    return [model, ema], loss


if __name__ == "__main__":
    main(Path())
