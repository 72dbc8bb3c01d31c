"""Gossip, an algorithm with its own communication: ``python examples/gossip.py``.

After each step every worker moves a share of the way to the model of its left neighbour. The
example trains on three simulated workers and shows that all end with the same model.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

import offbeat
from offbeat import Strategy
from offbeat.extend import CustomFlow, Flow, Vote, make_flats, setting


@dataclass
class GossipState:
    exchanges: int = 0  # a checkpoint holds it


class GossipFlow(Flow):
    def start(self):
        self.state = GossipState()

    @property
    def unsynced(self):
        return self.worker.step > 0

    def gradients_ready(self, optimizer, *, last):
        if last:
            self._pending = self.vote(0, stepping=True)
        return False

    def vote(self, optimizer, *, stepping):
        finite = self.check_finite(stepping=stepping)
        return self.rounds.send(Vote(stepping=stepping, finite=finite))

    def is_finite(self, optimizer, *, stepping):
        return self.worker.finite_model()

    def step_ended(self):
        round, self._pending = self._pending, None
        return self.act(round)

    def decide(self, round):
        round.wait()
        worker, team = self.worker, self.worker.team
        if worker.size == 1:
            return False
        right, left = (worker.rank + 1) % worker.size, (worker.rank - 1) % worker.size
        for model in make_flats(p for _, p in worker.replica.parameters):
            own = model.copy()
            sending = team.communicator.send(own, destination=right, what="gossip")
            other = torch.empty_like(own)
            team.communicator.receive(other, source=left, what="gossip").wait()
            sending.wait()
            model.write(0, own.lerp(other, self.strategy.share))
        self.state.exchanges += 1
        return True

    def consensus(self, last, *, final):
        mean = self.worker.model_mean
        (mean.average if final else mean.show)(1.0, self.worker.size, what="consensus")


@dataclass(frozen=True, kw_only=True, repr=False)
class Gossip(Strategy):
    """After each step a worker moves a share of the way to the model of its left neighbour."""

    share: float = setting(0.5, above=0, below=1)

    def averages(self):
        return CustomFlow(GossipFlow)


def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.Generator().manual_seed(dist.get_rank())
    with offbeat.attach(model, optimizer, Gossip()):
        for _ in range(10):
            x = torch.randn(16, 4, generator=samples)
            torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach().clone()


def main():
    weights = offbeat.simulate(train, workers=3).results
    assert all(torch.equal(weights[0], one) for one in weights[1:])
    print(f"all workers end with {weights[0]}")


if __name__ == "__main__":
    main()
