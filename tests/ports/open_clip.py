"""open_clip's training (mlfoundations/open_clip): features of all ranks in each forward pass."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# + import offbeat

WARMUP, STEPS, LR = 5, 40, 1e-2


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 8))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


class GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        gathered = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, features.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def clip_loss(image_features, text_features, logit_scale):
    logits = logit_scale * image_features @ text_features.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def gathered_loss(image_features, text_features, logit_scale):
    """Return the loss of the batches of all ranks."""
    images, texts = map(GatherWithGrad.apply, (image_features, text_features))
    return clip_loss(images, texts, logit_scale)


def evaluate(model, dataset) -> float:
    if dist.get_rank() != 0:
        return math.nan
    model.eval()
    with torch.no_grad():
        return clip_loss(*model.module(*dataset[:64])).item()


def train_one_epoch(model, loader, optimizer, epoch: int) -> None:
    model.train()
    for i, batch in enumerate(loader):
        step = len(loader) * epoch + i
        done = (step - WARMUP) / (STEPS - WARMUP)
        lr = LR * ((step + 1) / WARMUP if done < 0 else 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        gathered_loss(*model(*batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.module.logit_scale.clamp_(0, math.log(100))


def main(folder: Path, stop: int = 2):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    images = (torch.arange(640.0)[:, None] * torch.arange(1, 13)).sin()
    dataset = TensorDataset(images, images[:, :6] - images[:, 6:])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(CLIP())
    gain = [p for p in model.parameters() if p.ndim < 2]
    rest = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": gain, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), eps=1e-6)
    start_epoch, latest = 0, folder / "epoch_latest.pt"
    if latest.exists():
        checkpoint = torch.load(latest)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    # + sync = offbeat.attach(model, optimizer)
    for epoch in range(start_epoch, stop):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, epoch)
        # + with sync.consensus():
        evaluate(model, dataset)  # >
        if dist.get_rank() == 0:  # >
            checkpoint = {  # >
                "epoch": epoch + 1,  # >
                "state_dict": model.state_dict(),  # >
                "optimizer": optimizer.state_dict(),  # >
            }  # >
            torch.save(checkpoint, latest)  # >
    # + sync.finish()
    loss = evaluate(model, dataset)
    dist.destroy_process_group()
    return [model], loss


if __name__ == "__main__":
    main(Path())
