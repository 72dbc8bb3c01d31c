"""Landings are all or nothing, for any failing operation of a mean at any time."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
import worlds
from faults import Fault
from loops import Faulty, attach, bits
from offbeat.averaging import Replica, worker
from offbeat.averaging.averager import Averager
from offbeat.averaging.gradients import gradient_buckets
from offbeat.averaging.model_mean import ModelMean
from offbeat.transport.team import Team
from offbeat_lab.baselines.powersgd import PowerSGDFlow

# -- every operation of every mean ----------------------------------------------------------------


class Everything(nn.Module):
    """Parameters in three buckets of their own dtypes, statistics and counters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(30, 40)
        self.norm = nn.BatchNorm1d(40)
        self.b = nn.Linear(40, 35).double()
        self.c = nn.Linear(35, 40).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x)).tanh()
        return self.c(self.b(y.double()).to(torch.bfloat16)).float().square().mean()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer, sync: Any) -> dict[str, Tensor]:
    """Return the bits of all tensors that a mean may change."""
    found = {f"parameter {n}": p for n, p in model.named_parameters()}
    found |= {f"buffer {n}": b for n, b in model.named_buffers()}
    for name, p in model.named_parameters():
        state = optimizer.state[p].items()
        found |= {f"{k} of {name}": v for k, v in state if isinstance(v, Tensor)}
        if p.grad is not None:
            found[f"gradient {name}"] = p.grad
    flow = None if sync is None else sync._iteration.flow
    if isinstance(flow, Averager):
        found |= {f"P {i}": p for i, p in enumerate(flow.state.shared)}
        found |= {f"v {i}": v for i, v in enumerate(flow.state.velocity)}
    if isinstance(flow, PowerSGDFlow):
        found |= {f"Q or e {i}": t for i, t in enumerate([*flow.state.q, *flow.state.errors])}
    return {name: bits(tensor) for name, tensor in found.items()}


def attempt(rank: int, text: str, options: dict[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """Three steps of training; what was there just before an operation failed, and after that."""
    model = Everything(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    before: dict[str, Tensor] = {}
    sync: Any = None

    def look(*_: Any) -> None:  # before Offbeat's own hooks: just before the means
        before.clear()
        before.update(tensors_of(model, optimizer, sync))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    transport = Faulty(faults)
    dist.barrier()
    sync = attach(model, optimizer, text, group=transport, timeout_seconds=5, **options)
    counts, error = [transport.made.counts], ""
    try:
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * rank + step))
            loss = model(x)
            look()
            own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            for (name, _), gradient in zip(model.named_parameters(), own, strict=True):
                before[f"gradient {name}"] = bits(gradient)
            loss.backward()
            optimizer.step()
            counts.append(transport.made.counts)
    except offbeat.CommunicationError as caught:
        error = str(caught)
    after = tensors_of(model, optimizer, sync)
    sync.detach()
    changed = [
        name for name in before if name in after and not torch.equal(before[name], after[name])
    ]
    return {"counts": counts, "error": error, "changed": changed}


def every_operation(rank: int, size: int, text: str, options: dict[str, Any], kind: str) -> Any:
    """One training without a fault, and one for each operation of its second step."""
    plain = attempt(rank, text, options, [])
    broken = [1] if dist.get_backend() == "gloo" else list(range(size))
    seen = []
    for background, (first, last) in enumerate(zip(*plain["counts"][1:3], strict=True)):
        for operation in range(first, last):
            faults = [Fault(kind, one, operation, background=bool(background)) for one in broken]  # type: ignore[arg-type]
            what = f"{'background ' * background}{operation - first}"
            seen.append((what, attempt(rank, text, options, faults)))
    return plain, seen


INT8 = {"wire": "int8"}
MEANS = [
    ("local:period=1", {}),
    ("local:period=1", INT8),
    ("fedavg:period=1,fraction=0.5", {}),
    ("bsp", {}),
    ("bsp", INT8),
    ("async:staleness=2", {}),
    ("diloco:period=1", INT8),
    ("sparseloco:period=1", {}),
    ("powersgd:rank=1", {}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("text", "options"), MEANS, ids=str)
def test_a_mean_is_written_as_a_whole_or_not_at_all(
    text: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If any operation of a step fails, every bit is as before the mean."""
    small = partial(gradient_buckets, bucket_bytes=2048)
    monkeypatch.setattr(worker, "gradient_buckets", small)
    check(worlds.run(every_operation, text, options, "fail", workers=2), broken=1)


def final_mean(rank: int, size: int, operation: int) -> tuple[str, bool, int]:
    """Differing models, whose exact mean fails at this operation."""
    model = Everything(rank)
    faults = [Fault("fail", rank=one, operation=operation) for one in range(size)]
    transport = Faulty(faults)
    comm = transport.make_communicator(5)
    mean = ModelMean(Team(comm), Replica(model, model.parameters()))
    before = [bits(tensor) for tensor in (*model.parameters(), *model.buffers())]
    error = ""
    try:
        mean.average(1.0, size, what="a test")
    except offbeat.CommunicationError as caught:
        error = str(caught)
    after = [bits(tensor) for tensor in (*model.parameters(), *model.buffers())]
    return error, all(map(torch.equal, before, after)), transport.made.counts[0]


def test_the_exact_mean_is_written_as_a_whole_or_not_at_all() -> None:
    """Tests the means of a consensus and of the end: three buckets and the counters."""
    for error, unchanged, count in worlds.simulated(final_mean, 99, workers=2):
        assert (error, unchanged, count) == ("", False, 4)
    for operation in range(4):
        for error, unchanged, _ in worlds.simulated(final_mean, operation, workers=2):
            assert error
            assert unchanged, operation


def check(results: list[Any], broken: int) -> None:
    assert len(results[0][1]) >= 3, "there are operations to break"
    for rank, (plain, seen) in enumerate(results):
        assert plain["error"] == ""
        for operation, one in seen:
            assert one["error"] or rank != broken, ("nothing was raised", operation)
            if one["error"]:
                assert one["changed"] == [], (rank, operation, one["error"])
