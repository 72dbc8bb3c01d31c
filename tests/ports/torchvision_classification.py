"""torchvision's references/classification/train.py: BatchNorm, EMA, an evaluation by all ranks."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# + import offbeat


class ExponentialMovingAverage(AveragedModel):
    def __init__(self, model: nn.Module, decay: float) -> None:
        def ema_avg(avg_param, model_param, num_averaged):
            return decay * avg_param + (1 - decay) * model_param

        super().__init__(model, avg_fn=ema_avg, use_buffers=True)


def reduce_across_processes(value: float) -> torch.Tensor:
    t = torch.tensor(value, dtype=torch.float64)
    dist.barrier()
    dist.all_reduce(t)
    return t


def save_on_master(*args) -> None:
    if dist.get_rank() == 0:
        torch.save(*args)


def train_one_epoch(model, criterion, optimizer, data_loader, model_ema, warming_up) -> None:
    model.train()
    for i, (image, target) in enumerate(data_loader):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if i % 4 == 0:
            model_ema.update_parameters(model)
            if warming_up:  # keep copying the weights
                model_ema.n_averaged.fill_(0)


def evaluate(model, criterion, data_loader) -> float:
    model.eval()
    total, num_processed_samples = 0.0, 0
    with torch.inference_mode():
        for image, target in data_loader:
            total += criterion(model(image), target).item() * len(image)
            num_processed_samples += len(image)
    num_processed_samples = reduce_across_processes(num_processed_samples)
    if num_processed_samples != len(data_loader.dataset):
        raise AssertionError("each sample must be evaluated once")
    return (reduce_across_processes(total) / num_processed_samples).item()


def main(folder: Path, stop: int = 3):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    images = (torch.arange(640.0)[:, None] * torch.arange(1, 17)).sin()
    dataset = TensorDataset(images, (images[:, :4] * images[:, 4:8]).argmax(1))
    train, test = torch.utils.data.random_split(
        dataset, [512, 128], torch.Generator().manual_seed(0)
    )
    sampler = DistributedSampler(train)
    data_loader = DataLoader(train, batch_size=16, sampler=sampler)
    data_loader_test = DataLoader(test, 16, sampler=DistributedSampler(test, shuffle=False))

    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    norm, other = [*model[1].parameters()], [*model[0].parameters(), *model[3].parameters()]
    parameters = [{"params": norm, "weight_decay": 0.0}, {"params": other, "weight_decay": 1e-3}]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    warmup, cosine = LinearLR(optimizer, 0.1, total_iters=1), CosineAnnealingLR(optimizer, 2)
    lr_scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[1])

    model_without_ddp = model
    model = DistributedDataParallel(model)
    model_ema = ExponentialMovingAverage(model_without_ddp, decay=0.9)
    start_epoch = 0
    if (folder / "checkpoint.pth").exists():
        checkpoint = torch.load(folder / "checkpoint.pth")
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        model_ema.load_state_dict(checkpoint["model_ema"])
        start_epoch = checkpoint["epoch"] + 1
    # + sync = offbeat.attach(model, optimizer)
    for epoch in range(start_epoch, stop):
        sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, model_ema, epoch < 1)
        lr_scheduler.step()
        # + with sync.consensus(also=[model_ema]):
        evaluate(model, criterion, data_loader_test)  # >
        loss = evaluate(model_ema, criterion, data_loader_test)  # >
        checkpoint = {  # >
            "model": model_without_ddp.state_dict(),  # >
            "optimizer": optimizer.state_dict(),  # >
            "lr_scheduler": lr_scheduler.state_dict(),  # >
            "epoch": epoch,  # >
            "model_ema": model_ema.state_dict(),  # >
        }  # >
        save_on_master(checkpoint, folder / "checkpoint.pth")  # >
    # + sync.finish(also=[model_ema])
    dist.destroy_process_group()
    return [model, model_ema], loss


if __name__ == "__main__":
    main(Path())
