"""MAE's main_pretrain.py (facebookresearch/mae): MetricLogger, its own print, a wrapped scaler."""

import builtins
import math
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# + import offbeat

ACCUM_ITER, LR, WARMUP_EPOCHS = 2, 2e-2, 0.5


def setup_for_distributed(is_master: bool) -> None:
    builtin_print = builtins.print

    def print(*args, force=False, **kwargs) -> None:
        if is_master or force:
            builtin_print(*args, **kwargs)

    builtins.print = print


class MetricLogger:
    def __init__(self) -> None:
        self.meters = defaultdict(lambda: [0, 0.0])  # count, total

    def update(self, **values: float) -> None:
        for name, value in values.items():
            count, total = self.meters[name]
            self.meters[name] = [count + 1, total + value]

    def synchronize_between_processes(self) -> None:
        for name, meter in self.meters.items():
            t = torch.tensor(meter, dtype=torch.float64)
            dist.barrier()
            dist.all_reduce(t)
            self.meters[name] = t.tolist()


class NativeScaler:
    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, clip_grad, parameters, update_grad: bool) -> None:
        self._scaler.scale(loss).backward()
        if update_grad:
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()


def adjust_learning_rate(optimizer, epoch: float, epochs: int) -> None:
    """Cosine with a warm-up, in every iteration."""
    after = (epoch - WARMUP_EPOCHS) / (epochs - WARMUP_EPOCHS)
    lr = LR * (epoch / WARMUP_EPOCHS if after < 0 else 0.5 + 0.5 * math.cos(math.pi * after))
    for group in optimizer.param_groups:
        group["lr"] = lr


def save_model(folder: Path, epoch: int, model, optimizer, loss_scaler) -> None:
    if dist.get_rank() == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        states |= {"epoch": epoch, "scaler": loss_scaler._scaler.state_dict()}
        torch.save(states, folder / "checkpoint.pth")


def load_model(folder: Path, model, optimizer, loss_scaler) -> int:
    if not (folder / "checkpoint.pth").exists():
        return 0
    states = torch.load(folder / "checkpoint.pth")
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    loss_scaler._scaler.load_state_dict(states["scaler"])
    return states["epoch"] + 1


def main(folder: Path, stop: int = 2, epochs: int = 2):
    dist.init_process_group("gloo")
    setup_for_distributed(dist.get_rank() == 0)
    torch.manual_seed(dist.get_rank())
    images = (torch.arange(512.0)[:, None] * torch.arange(1, 17) / 20).sin()
    sampler = DistributedSampler(images, shuffle=True)
    loader = DataLoader(images, batch_size=8, sampler=sampler, drop_last=True)
    model_without_ddp = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))
    model = DistributedDataParallel(model_without_ddp)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    loss_scaler = NativeScaler()
    start_epoch = load_model(folder, model_without_ddp, optimizer, loss_scaler)
    # + sync = offbeat.attach(model, optimizer, scaler=loss_scaler._scaler)
    for epoch in range(start_epoch, stop):
        sampler.set_epoch(epoch)
        metric_logger = MetricLogger()
        for i, x in enumerate(loader):
            if i % ACCUM_ITER == 0:
                adjust_learning_rate(optimizer, i / len(loader) + epoch, epochs)
            loss = ((model(x * (torch.rand_like(x) > 0.25)) - x) ** 2).mean()
            update = (i + 1) % ACCUM_ITER == 0
            loss_scaler(loss / ACCUM_ITER, optimizer, 1.0, model.parameters(), update)
            if update:
                optimizer.zero_grad()
            metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        # + sync.mean(0.0)
        metric_logger.synchronize_between_processes()
        print("Averaged stats:", dict(metric_logger.meters))
        # + with sync.consensus():
        save_model(folder, epoch, model_without_ddp, optimizer, loss_scaler)  # >
    # + sync.finish()
    dist.destroy_process_group()
    with torch.no_grad():
        return [model], ((model(images) - images) ** 2).mean().item()


if __name__ == "__main__":
    main(Path())
