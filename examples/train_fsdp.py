"""A small GPT that ``fully_shard`` divides inside each machine, and Offbeat averages between them.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2
        --master-addr 127.0.0.1 --master-port 29500 examples/train_fsdp.py

A second terminal with ``--node-rank 1`` is the second machine. docs/coming-from-fsdp.md shows the
lines that differ from the same script with HSDP.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import offbeat

WIDTH, CONTEXT = 64, 64
TEXT = torch.tensor([*Path(argparse.__file__).read_bytes()]).unfold(0, CONTEXT + 1, CONTEXT)
HELD_OUT, TRAIN = TEXT[::10], TEXT[torch.arange(len(TEXT)) % 10 > 0]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, texts: Tensor) -> Tensor:
    return cross_entropy(model(texts[:, :-1]).transpose(1, 2), texts[:, 1:])


def evaluate(step: int, model: nn.Module) -> None:
    with torch.no_grad():
        loss = loss_of(model, HELD_OUT)
    print(f"rank {dist.get_rank()}, step {step}: held-out loss {loss:.4f}")


def main(folder: Path, steps: int) -> nn.Module:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = GPT()
    inside = int(os.environ["LOCAL_WORLD_SIZE"])  # processes of this machine
    shape = dist.get_world_size() // inside, inside
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)

    sync = offbeat.attach(model, optimizer, node_group="auto")
    offbeat.load(folder / "checkpoints", sync, scheduler=schedule)
    for step in range(schedule.last_epoch, steps):
        torch.manual_seed(step * dist.get_world_size() + rank)
        batch = torch.randint(len(TRAIN), (8,))
        loss_of(model, TRAIN[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            with sync.consensus():
                evaluate(step, model)
            offbeat.save(folder / "checkpoints", sync, scheduler=schedule)
    sync.finish()
    evaluate(steps, model)
    dcp.save({"model": states.get_model_state_dict(model)}, checkpoint_id=folder / "model")
    return model


if __name__ == "__main__":
    main(Path("runs/fsdp"), 200)
    dist.destroy_process_group()
