"""The script of the workers: its model tells which samples were trained on.

The model has one number for each sample of each epoch. A step adds 1 to the numbers of its batch,
and the mean over N workers divides that by N. So a number of the final model is above 0 if and only
if the sample is in it. Each worker logs its batches before it trains on them.
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
from offbeat.data.leasing.access import open_board, team_of
from offbeat.errors import CommunicationError

LEAST = 0.02
"""A number of the model above this is a sample that was trained on."""
FAILURES = 8
"""Number of attempts to save that may fail because other workers are lost."""


class Uses(nn.Module):
    """The model."""

    def __init__(self, epochs: int, samples: int) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(epochs, samples))

    def forward(self, epoch: int, batch: Tensor) -> Tensor:
        return -self.uses[epoch, batch].sum()


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


def resources() -> list[int]:
    """Return the numbers of threads and descriptors, and the resident memory in kilobytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts = [len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")]
    return [*counts, pages * os.sysconf("SC_PAGE_SIZE") // 1024]


def missing(sampler: Any, model: Uses) -> int:
    """Return how many samples neither the model nor the plan of the sampler has."""
    found = model.uses.detach() > LEAST
    for epoch in range(sampler.epoch, len(found)):
        found[epoch, torch.as_tensor(sampler._leases.proposal(epoch).samples)] = True
    return int((~found).sum())


class Training:
    """One worker's training."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.settings = folder, json.loads((folder / "settings.json").read_text())
        self.log = Log(folder)
        self.saves = {"count": 0}
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
        board = open_board(sync, "soak", lambda: None)
        own = uuid.uuid4().hex
        self.log.write(
            "attached",
            training=board.compare_set("name", "", own) or own,
            worker=team_of(sync).identity,
            view=sync.stats.details["view"],
        )
        data = TensorDataset(torch.arange(settings["samples"]))
        sampler = self.sampler = offbeat.data.LeasedSampler(data, settings["batch"], sync=sync)
        loader = offbeat.data.LeasedLoader(DataLoader(data, batch_sampler=sampler))
        if settings["save_every"]:
            found = offbeat.load(self.folder / "checkpoints", sync)
            if found is not None:
                sampler.load_state_dict(found.extra)
                self.log.write("loaded", step=found.step, missing=missing(sampler, model))
                self.saves["count"] = sync.step // settings["save_every"]
        sync.share_state(lambda: self.saves, self.saves.update)
        self.save_if_due()
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for (batch,) in loader:
                self.step(batch)
        perhaps_die(self.folder, "die-at-end")
        self.log.write("last")
        for (batch,) in loader.leftovers():
            self.step(batch)
        sync.finish()
        uses = model.uses.detach()
        self.log.write(
            "ended", missing=int((uses <= LEAST).sum()), sum=uses.double().sum().item().hex()
        )

    def step(self, batch: Tensor) -> None:
        """Train on one batch."""
        lease, details = [*self.sampler._uses][-1], self.sync.stats.details
        self.log.write(
            "step",
            epoch=lease.epoch,
            issue=int(lease.state.partition("#")[2]),
            batch=batch.tolist(),
            repeated=self.sampler.repeated,
            step=self.sync.step,
            view=details["view"],
            resources=resources(),
        )
        if take_order(self.folder, "raise") is not None:
            raise RuntimeError("ordered")
        self.model(lease.epoch, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not (self.folder / "hurry").exists():
            time.sleep(self.settings["step_seconds"])
        self.save_if_due()

    def save_if_due(self) -> None:
        """Save when all workers do, which are in lock step.

        A worker that joins while the others save has their step, and has to save, too. Late in the
        training a worker may have ended, which would not take part.
        """
        every, last = self.settings["save_every"], self.settings["last_save"]
        failures = 0
        while every and self.saves["count"] < min(self.sync.step, last) // every:
            try:
                with self.sync.consensus():
                    self.saves["count"] += 1
                    extra = self.sampler.state_dict()
                    offbeat.save(self.folder / "checkpoints", self.sync, extra=extra)
            except CommunicationError as error:
                self.log.write("not saved", error=str(error))
                failures += 1
                if failures > FAILURES:  # for example, the store is lost
                    raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(format="%(created).2f %(message)s", level=logging.INFO)
    Training(Path(sys.argv[1])).run()
