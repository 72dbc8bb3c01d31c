"""``optimizer_state="average"``: momentum and moments take the mean of the workers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from loops import attach, start
from problems import OPTIMIZERS, assign, flat, make_batch, make_model, train_step
from worlds import run

STATE = {"momentum": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq"]}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> Tensor:
    return torch.cat([optimizer.state[p][key].reshape(-1) for p in model.parameters()]).clone()


def train(rank: int, size: int, text: str, kind: str, steps: int) -> dict[str, Any]:
    model, optimizer, sync = start(rank, text, kind)
    for step in range(steps):
        train_step(model, optimizer, make_batch(rank, step))
    states = {key: state_of(model, optimizer, key) for key in STATE[kind]}
    counts = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
    own, sent = flat(model), sync.stats.payload_bytes
    sync.finish()
    return {"model": own, "counts": counts, "sent": sent, **states}


def reference(workers: int, kind: str, period: int, steps: int) -> list[dict[str, Tensor]]:
    """Local SGD in one process, whose means include the state."""
    first = make_model(0)
    models = [copy.deepcopy(first) for _ in range(workers)]
    optimizers = [OPTIMIZERS[kind](m.parameters()) for m in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, make_batch(rank, step))
        if (step + 1) % period == 0:
            mean = torch.stack([flat(m) for m in models]).mean(0)
            for model in models:
                assign(model, mean.clone())
            for key in STATE[kind]:
                for parameters in zip(*(m.parameters() for m in models), strict=True):
                    tensors = [o.state[p][key] for o, p in zip(optimizers, parameters, strict=True)]
                    value = torch.stack(tensors).mean(0)
                    for tensor in tensors:
                        tensor.copy_(value)
    return [
        {"model": flat(m), **{key: state_of(m, o, key) for key in STATE[kind]}}
        for m, o in zip(models, optimizers, strict=True)
    ]


@pytest.mark.parametrize("kind", sorted(STATE))
@pytest.mark.parametrize(
    "text",
    ["local:period=3", "selsync:delta=inf,max_interval=3", "diloco:period=3,outer_lr=1.0"],
)
def test_state_is_averaged_with_the_models(kind: str, text: str) -> None:
    """Every mean of the models also averages the state, without the counters."""
    text += ",outer_momentum=0.0" * text.startswith("diloco") + ",optimizer_state=average"
    found = run(train, text, kind, 8, workers=3)
    for one, want in zip(found, reference(3, kind, 3, 8), strict=True):
        for key, value in want.items():
            torch.testing.assert_close(one[key], value, rtol=0, atol=1e-12)
        assert set(one["counts"]) <= {8.0}


def test_with_fragments_state_is_averaged_with_the_last_one() -> None:
    """All of the state is averaged once a period, when the last fragment lands."""
    text = "diloco:period=2,fragments=2,optimizer_state=average"
    for steps, equal in ((2, True), (3, False), (4, True)):
        first, second = run(train, text, "momentum", steps, workers=2)
        assert torch.equal(first["momentum_buffer"], second["momentum_buffer"]) == equal


def test_local_is_the_default_and_costs_nothing() -> None:
    """Momentum then differs between the workers after a mean, and fewer bytes are sent."""
    local = run(train, "local:period=3", "momentum", 6, workers=2)
    averaged = run(train, "local:period=3,optimizer_state=average", "momentum", 6, workers=2)
    assert torch.equal(local[0]["model"], local[1]["model"])
    assert not torch.equal(local[0]["momentum_buffer"], local[1]["momentum_buffer"])
    assert torch.equal(averaged[0]["momentum_buffer"], averaged[1]["momentum_buffer"])
    model_bytes = 8 * averaged[0]["model"].numel()
    # two means, each with as many bytes of momentum and two numbers that compare
    assert averaged[0]["sent"] - local[0]["sent"] == 2 * (model_bytes + 16)


def _uneven(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rank 0 never uses the second layer."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    with attach(layers, optimizer, "local:period=2,optimizer_state=average"):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
            y = layers[0](x)
            (y if rank == 0 else layers[1](y)).square().sum().backward()
            optimizer.step()
        shared = optimizer.state[layers[0].weight]["momentum_buffer"].clone()
        other = optimizer.state[layers[1].weight].get("momentum_buffer")
    return shared, torch.zeros(0) if other is None else other.clone(), layers[1].weight.detach()


def test_what_a_worker_lacks_stays_local() -> None:
    """State that only some workers have does not change. The rest is averaged."""
    (shared_0, none, _), (shared_1, first, _), (_, second, _) = run(_uneven, workers=3)
    assert torch.equal(shared_0, shared_1)
    assert none.numel() == 0
    assert not torch.equal(first, second)


def _counted(rank: int, size: int) -> list[float]:
    """The optimizer of rank n has taken 10·n steps before."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_step(model, optimizer, make_batch(rank, 0))
    for state in optimizer.state.values():
        state["step"].fill_(10.0 * rank)
    with attach(model, optimizer, "local:period=1,optimizer_state=average"):
        train_step(model, optimizer, make_batch(rank, 1))
    return sorted({float(state["step"]) for state in optimizer.state.values()})


def test_counters_stay_with_the_worker() -> None:
    """A mean of step counts would be wrong for every worker's bias correction in Adam."""
    assert run(_counted, workers=3) == [[1.0], [11.0], [21.0]]


def _complex(rank: int, size: int) -> Tensor:
    """Momentum g + 2g of a complex parameter, with g = rank + 1 in every step: 3·(rank + 1)."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=2.0)
    with attach(model, optimizer, "local:period=2,optimizer_state=average"):
        for _ in range(2):
            weight.grad = torch.full_like(weight, (rank + 1) * (1 + 1j))
            optimizer.step()
        return torch.view_as_real(optimizer.state[weight]["momentum_buffer"].clone())


def test_complex_state_is_averaged() -> None:
    for momentum in run(_complex, workers=2):
        assert torch.equal(momentum, torch.full((2, 2), 4.5, dtype=torch.float64))


class Coded(torch.optim.SGD):
    """An optimizer with quantized state, like optimizers with 8 bits."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, lr=0.1)
        self._kind = kind

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            codes = torch.zeros_like(p, dtype=torch.uint8)
            around = torch.zeros_like(p).as_subclass(type("Around", (Tensor,), {}))
            self.state[p] = {"codes": codes if self._kind == "bytes" else around}


def _coded(rank: int, size: int, kind: str) -> str:
    model = make_model(seed=rank)
    optimizer = Coded(model.parameters(), kind)
    sync = attach(model, optimizer, "local:period=2,optimizer_state=average")
    train_step(model, optimizer, make_batch(rank, 0))
    with pytest.raises(offbeat.AttachError) as caught:
        train_step(model, optimizer, make_batch(rank, 1))
    sync.detach()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["bytes", "around"])
def test_quantized_state_is_refused(kind: str) -> None:
    """Quantized values and their scales cannot be averaged separately."""
    for message in run(_coded, kind, workers=2):
        assert "'codes' of parameter '0.weight' in this Coded is quantized" in message
