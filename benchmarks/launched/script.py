"""The script of the workers, each of which logs its batches before it trains on them.

The model has one number for each sample of each epoch. A step adds 1 to the numbers of its batch.
Two more numbers move towards a value that follows from the batch, so the model of each step depends
on all steps before. ``judge.py`` computes both without torch.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from benchmarks.launched.judge import RATE, target
from offbeat.errors import CommunicationError
from offbeat.synchronizer import components_of, has_joined


class Uses(nn.Module):
    """The model: ``uses`` between the two numbers, so that they are first and last in messages."""

    def __init__(self, epochs: int, samples: int) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.uses = nn.Parameter(torch.zeros(epochs, samples, dtype=torch.float64))

    def forward(self, epoch: int, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return what makes the two numbers move, and the sum of the numbers of the batch."""
        aim = target(batch.tolist())
        loss = RATE / 2 * ((self.first - aim).square() + (self.last - aim).square())
        return loss, self.uses[epoch, batch].sum()

    def state(self) -> list[float]:
        """Return the two numbers and the sum of all others."""
        with torch.no_grad():
            return [self.first.item(), self.last.item(), self.uses.sum().item()]


class Log:
    """Lines of JSON, which survive the death of this process."""

    def __init__(self, folder: Path) -> None:
        name = folder / "logs" / f"{os.getpid()}-{uuid.uuid4().hex[:4]}.jsonl"
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **values: Any) -> None:
        line = {"event": event, "at": time.monotonic(), **values}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def take_order(folder: Path, order: str) -> float | None:
    """Take the file ``order``, and return its number. None if there is no such file."""
    mine = folder / f"{order}-{os.getpid()}"
    try:
        (folder / order).rename(mine)
    except FileNotFoundError:
        return None
    return float(mine.read_text())


def perhaps_die(folder: Path, order: str) -> None:
    """Kill this process soon, after the seconds in ``order``, if there is such an order."""
    seconds = take_order(folder, order)
    if seconds is not None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


class Training:
    """One worker's training."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.settings = folder, json.loads((folder / "settings.json").read_text())
        self.log = Log(folder)
        place = [os.environ["MACHINE"], os.environ["LOCAL_RANK"]]
        self.log.write("started", pid=os.getpid(), slot=":".join(place))

    def run(self) -> None:
        """Train, and log what happens."""
        settings, epochs = self.settings, self.settings["epochs"]
        model = self.model = Uses(epochs, settings["samples"])
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        perhaps_die(self.folder, "die-in-attach")
        sync = self.sync = offbeat.attach(
            model,
            self.optimizer,
            offbeat.parse_strategy(settings["strategy"]),
            wire="float32",
            timeout_seconds=settings["timeout_seconds"],
        )
        team = components_of(sync, "the soak").team
        own = uuid.uuid4().hex
        self.log.write(
            "attached",
            training=team.communicator.store("soak").compare_set("name", "", own) or own,
            worker=team.identity,
            generation=sync.stats.details["generation"],
        )
        data = TensorDataset(torch.arange(settings["samples"]))
        sampler = self.sampler = offbeat.data.LeasedSampler(data, settings["batch"], sync=sync)
        loader = offbeat.data.LeasedLoader(DataLoader(data, batch_sampler=sampler))
        if settings["saves"]:
            found = offbeat.load(self.folder / "checkpoints", sync)
            if found is not None:
                sampler.load_state_dict(found.extra)
                self.log.write("loaded", model=model.state())
        if not has_joined(sync):
            self.log.write("data", left=self.left(epochs))
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for (batch,) in loader:
                self.step(epoch, batch)
            if settings["saves"] and epoch < epochs - 1:
                self.save()
        perhaps_die(self.folder, "die-at-end")
        self.log.write("last")
        sync.finish()
        self.log.write("ended", model=model.state())

    def left(self, epochs: int) -> list[tuple[int, list[int]]]:
        """Return the samples that are left of each epoch."""
        sampler, size = self.sampler, self.settings["batch"]
        found = []
        for epoch in range(sampler.epoch, epochs):
            order = sampler._order_of(epoch)
            batches = sampler._batches_of(epoch).tolist()
            parts = [order[b * size : (b + 1) * size].tolist() for b in batches]
            found.append((epoch, [sample for part in parts for sample in part]))
        return found

    def step(self, epoch: int, batch: Tensor) -> None:
        """Train on one batch."""
        loss, uses = self.model(epoch, batch)
        self.log.write(
            "step",
            loss=loss.item(),
            model=self.model.state(),
            epoch=epoch,
            queue=self.sampler._leases.number,
            batch=batch.tolist(),
            repeated=self.sampler.repeated,
            step=self.sync.step,
            generation=self.sync.stats.details["generation"],
            members=self.sync.size,
        )
        if take_order(self.folder, "detach") is not None:
            self.sync.detach()
            raise RuntimeError("ordered after detach()")
        if take_order(self.folder, "raise") is not None:
            raise RuntimeError("ordered")
        (loss - uses).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not (self.folder / "hurry").exists():
            time.sleep(self.settings["step_seconds"])

    def save(self) -> None:
        """Save after an epoch. A worker that is lost meanwhile makes it fail on the others."""
        self.log.write("waits")
        try:
            with self.sync.consensus():
                perhaps_die(self.folder, "die-in-save")
                self.log.write("saves", model=self.model.state())
                extra = self.sampler.state_dict()
                offbeat.save(self.folder / "checkpoints", self.sync, extra=extra)
        except CommunicationError as error:
            self.log.write("not saved", error=str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(format="%(created).2f %(message)s", level=logging.INFO)
    Training(Path(sys.argv[1])).run()
