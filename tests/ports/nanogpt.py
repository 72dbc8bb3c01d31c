"""build-nanogpt's train_gpt2.py (karpathy): accumulation by a flag of DDP, a mean in every step."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

# + import offbeat

B, T, GRAD_ACCUM_STEPS, MAX_STEPS, WARMUP_STEPS, MAX_LR = 4, 8, 2, 40, 4, 1e-2


class GPT(nn.Module):
    """One block, whose embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(16, 24), nn.Embedding(T, 24)
        self.c_attn, self.ln, self.lm_head = nn.Linear(24, 72), nn.LayerNorm(24), nn.Linear(24, 16)
        nn.init.normal_(self.wte.weight, std=0.1)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(T))
        q, k, v = self.c_attn(self.ln(x)).split(24, dim=2)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class DataLoaderLite:
    def __init__(self, process_rank: int, num_processes: int) -> None:
        self.process_rank, self.num_processes = process_rank, num_processes
        n = torch.arange(6000)
        self.tokens = (n * 5 + n // 11) % 16
        self.reset()

    def reset(self) -> None:
        self.position = B * T * self.process_rank

    def next_batch(self):
        buf = self.tokens[self.position : self.position + B * T + 1]
        self.position += B * T * self.num_processes
        if self.position + B * T * self.num_processes + 1 > len(self.tokens):
            self.reset()
        return buf[:-1].view(B, T), buf[1:].view(B, T)


def get_lr(it: int) -> float:
    if it < WARMUP_STEPS:
        return MAX_LR * (it + 1) / WARMUP_STEPS
    done = (it - WARMUP_STEPS) / (MAX_STEPS - WARMUP_STEPS)
    return MAX_LR * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def main(folder: Path):
    dist.init_process_group("gloo")
    ddp_rank, ddp_world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337)
    train_loader = DataLoaderLite(ddp_rank, ddp_world_size)
    val_loader = DataLoaderLite(ddp_rank, ddp_world_size)
    model = DistributedDataParallel(GPT())
    raw_model = model.module
    decay = [p for p in raw_model.parameters() if p.dim() >= 2]
    nodecay = [p for p in raw_model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=MAX_LR, betas=(0.9, 0.95), fused=True)
    # + sync = offbeat.attach(model, optimizer)
    for step in range(MAX_STEPS):
        last_step = step == MAX_STEPS - 1
        if step % 20 == 0 or last_step:
            model.eval()
            val_loader.reset()
            val_loss_accum = torch.zeros([])
            # + with torch.no_grad(), sync.consensus():
            with torch.no_grad():  # -
                for _ in range(10):
                    _, loss = model(*val_loader.next_batch())
                    val_loss_accum += loss.detach() / 10
                # + if ddp_rank == 0:
                # +     torch.save(raw_model.state_dict(), folder / f"model_{step:05d}.pt")
            dist.all_reduce(val_loss_accum, op=dist.ReduceOp.SUM)  # -
            val_loss_accum /= ddp_world_size  # -
            # + val_loss_accum = sync.mean(val_loss_accum)
            if ddp_rank == 0:
                print(f"{step} val {val_loss_accum.item():.4f}")
                torch.save(raw_model.state_dict(), folder / f"model_{step:05d}.pt")  # -
        model.train()
        optimizer.zero_grad()
        loss_accum = torch.zeros([])
        for micro_step in range(GRAD_ACCUM_STEPS):
            x, y = train_loader.next_batch()
            model.require_backward_grad_sync = micro_step == GRAD_ACCUM_STEPS - 1
            _, loss = model(x, y)
            loss = loss / GRAD_ACCUM_STEPS
            loss_accum += loss.detach()
            loss.backward()
        dist.all_reduce(loss_accum, op=dist.ReduceOp.SUM)  # -
        loss_accum /= ddp_world_size  # -
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(step)
        optimizer.step()
        if ddp_rank == 0:
            print(f"step {step:5d} | loss: {loss_accum.item():.6f} | norm: {norm:.4f}")
    # + sync.finish()
    dist.destroy_process_group()
    return [model], val_loss_accum.item()


if __name__ == "__main__":
    main(Path())
