"""Where trainings with bfloat16 parameters end: ``python -m benchmarks.race.bfloat16 [SEEDS]``.

Four simulated workers train the model of ``models/byte_transformer.py`` on links of 50 Mbit/s. The
parameters, and so the gradients, are float32 or bfloat16. There are no float32 copies of the
parameters. AdamW rounds them to the nearest bfloat16 number, or at random (``StochasticAdamW``).
The *ideal* is BSP on an infinitely fast network. Results are appended to
``results/bfloat16.jsonl``. Those with a ``mechanism`` are of patched code: a landing rounds the
local model to the nearest number and keeps the error ("residual", as the code does now), or loses
it ("none"), or it rounds at random ("sr").
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import offbeat
from benchmarks.harness import RESULTS, machine
from benchmarks.models.byte_transformer import CONTEXT, task
from offbeat.strategies.registry import parse_strategy
from offbeat_lab import Setup
from offbeat_lab.recipes.models.transformers import ByteTransformer

WORKERS, STEPS = 4, 320
LINKS = {"ideal": offbeat.Network("100000Gbit/s", latency=0)}
OTHERS = offbeat.Network("50Mbit/s", latency="100us")
METHODS = ("ideal", "streaming", "local:period=8", "async:staleness=4")


def round_at_random(values: torch.Tensor) -> torch.Tensor:
    """Return float32 ``values`` as bfloat16. The expected value of the result is the value."""
    bits = values.view(torch.int32)
    noise = torch.randint(2**16, bits.shape, dtype=torch.int32)
    return ((bits + noise) & -(2**16)).view(torch.float32).bfloat16()


class StochasticAdamW(torch.optim.AdamW):
    """AdamW with float32 moments that rounds the parameters at random."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    zeros = torch.zeros(p.shape)
                    state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
                m, v, gradient = state["exp_avg"], state["exp_avg_sq"], p.grad.float()
                state["step"] += 1
                steps = int(state["step"])
                m.lerp_(gradient, 1 - first)
                v.lerp_(gradient.square(), 1 - second)
                x = p.float() * (1 - group["lr"] * group["weight_decay"])
                root = (v / (1 - second**steps)).sqrt_().add_(group["eps"])
                x.addcdiv_(m, root, value=-group["lr"] / (1 - first**steps))
                p.copy_(x if p.dtype == torch.float32 else round_at_random(x))


def train(
    method: str, seed: int, *, dtype: torch.dtype, stochastic: bool, lr: float
) -> tuple[float, float]:
    """Train on this worker. Returns the held-out bits per byte, and the norm of the model."""
    torch.manual_seed(seed)
    model = ByteTransformer(CONTEXT, width=64)
    model.to(dtype)
    work = task(model)
    work.steps = STEPS
    kind = StochasticAdamW if stochastic else torch.optim.AdamW
    work.optimizer = kind(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
    work.complete(Setup(WORKERS, 1, seed))
    strategy = offbeat.BSP() if method == "ideal" else parse_strategy(method)
    sync = offbeat.attach(model, work.optimizer, strategy)
    generator = torch.Generator().manual_seed(1000 * seed + sync.rank)
    if method != "ideal":  # there all workers have to round alike
        torch.manual_seed(1000 * seed + sync.rank)
    for _ in range(STEPS):
        indices = torch.randint(len(work.samples), (work.batch_size,), generator=generator)
        work.loss(model, work.samples.batch(indices.tolist())).backward()
        work.optimizer.step()
        work.advance()
    sync.finish()
    if sync.rank:
        return 0.0, 0.0
    trained = copy.deepcopy(model).float()
    return work.evaluate(trained)["bits per byte"], float(
        torch.cat([p.detach().flatten() for p in trained.parameters()]).norm()
    )


def run(method: str, seed: int, **settings: Any) -> None:
    """Train once, and append the result."""
    began = time.time()
    result = offbeat.simulate(
        lambda: train(method, seed, **settings),
        workers=WORKERS,
        network=LINKS.get(method, OTHERS),
        compute=offbeat.Compute("25ms"),
        seed=seed,
    )
    bits, norm = result.results[0]
    settings["dtype"] = str(settings["dtype"]).removeprefix("torch.")
    line = {
        "method": method,
        "seed": seed,
        **settings,
        "workers": WORKERS,
        "steps": STEPS,
        "bits per byte": bits,
        "norm": norm,
        "seconds": round(time.time() - began),
        "machine": machine(),
    }
    print(method, seed, settings, round(bits, 4), round(norm, 3), flush=True)
    with (RESULTS / "bfloat16.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def main(seeds: int) -> None:
    """Train with every method and dtype, at a low rate only with the first two methods."""
    kinds = ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    for seed in range(seeds):
        for dtype, stochastic in kinds:
            for method in METHODS:
                run(method, seed, dtype=dtype, stochastic=stochastic, lr=1.6e-2)
        for dtype, stochastic in kinds[::2]:
            for method in METHODS[:2]:
                run(method, seed, dtype=dtype, stochastic=stochastic, lr=1e-3)


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["3"])[0]))
