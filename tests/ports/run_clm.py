"""run_clm_no_trainer.py (huggingface/transformers): Accelerate's loop, with a stand-in for it."""

import contextlib
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

# + import offbeat


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Steps at the end of an accumulation only."""

    def __init__(self, optimizer, accelerator) -> None:
        self.optimizer, self.accelerator = optimizer, accelerator
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults

    def zero_grad(self) -> None:
        if self.accelerator.sync_gradients:
            self.optimizer.zero_grad()

    def step(self) -> None:
        if self.accelerator.sync_gradients:
            self.optimizer.step()


class Accelerator:
    """What the script uses of Accelerate."""

    def __init__(self, gradient_accumulation_steps: int) -> None:
        self.every, self.passes, self.sync_gradients = gradient_accumulation_steps, 0, True
        dist.init_process_group("gloo")
        self.is_main_process = dist.get_rank() == 0

    def prepare(self, model, optimizer):
        return DistributedDataParallel(model), AcceleratedOptimizer(optimizer, self)

    @contextlib.contextmanager
    def accumulate(self, model):
        self.passes += 1
        self.sync_gradients = self.passes % self.every == 0
        with contextlib.nullcontext() if self.sync_gradients else model.no_sync():
            yield

    def backward(self, loss) -> None:
        (loss / self.every).backward()

    def gather_for_metrics(self, t):
        parts = [torch.zeros_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, t)
        return torch.cat(parts)

    def wait_for_everyone(self) -> None:
        dist.barrier()


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 24), nn.Linear(24, 16)

    def forward(self, ids):
        logits = self.head(torch.tanh(self.embed(ids[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def main(folder: Path):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(dist.get_rank())
    texts = (torch.arange(640)[:, None] * 5 + torch.arange(9) ** 2) % 16
    sampler, held_out = DistributedSampler(texts), DistributedSampler(texts[:64], shuffle=False)
    train_dataloader = DataLoader(texts, batch_size=8, sampler=sampler, drop_last=True)
    eval_dataloader = DataLoader(texts[:64], batch_size=8, sampler=held_out)
    model = Bigrams()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 40))
    model, optimizer = accelerator.prepare(model, optimizer)
    # + sync = offbeat.attach(model, optimizer)
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                if accelerator.sync_gradients:  # as in AcceleratedScheduler
                    lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        losses = []
        # + with sync.consensus():
        for batch in eval_dataloader:  # >
            with torch.no_grad():  # >
                loss = model(batch)  # >
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch))))  # >
        eval_loss = torch.cat(losses).mean().item()
        print(f"epoch {epoch}: perplexity: {math.exp(eval_loss)}")
    accelerator.wait_for_everyone()  # -
    # + sync.finish()
    if accelerator.is_main_process:
        torch.save(model.module.state_dict(), folder / "pytorch_model.bin")
    dist.destroy_process_group()
    return [model], eval_loss


if __name__ == "__main__":
    main(Path())
