"""Regression tests: small scripts in which testers met a defect, each by its name.

A script runs on two processes over gloo, as ``script(rank, strategy, *arguments)``, and returns its
``Facts``.
"""

import builtins
import functools
import itertools
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.nn.utils.prune import l1_unstructured
from torch.optim import SGD, Adam, Optimizer, RMSprop

import offbeat
from loops import Quick, all_numbers, attach, error_of, sgd
from offbeat.launcher.store import listen, serve
from offbeat.quantization.kernels import kernels
from offbeat.transport.torch_backend.store_access import call_within
from problems import flat
from workers import run

COMMANDS = {
    "bn_leftover": "local:period=4 / diloco:period=5",
    "builtin_print": "streaming",
    "clip_titan": "bsp",
    "consensus_then_finish": "local:period=4 / streaming:outer_gain=1 / async",
    "constraint": "local:period=4 / bsp / streaming",
    "gan": "bsp ranks / bsp pattern / streaming ranks",
    "join": "bsp / streaming",
    "lazy_buffer": "streaming none / streaming register / local:period=4 rebind",
    "min_resize": "local:period=4 / streaming",
    "mismatched_calls": "bsp consensus save / streaming save consensus / streaming save finish",
    "n_critic": "bsp",
    "new_optimizer": "streaming",
    "overflow_one_rank": "bsp float32 / bsp float32 clip / bsp int8 clip / bsp int4 clip",
    "own_collective": "streaming:staleness=2,parts=1 / streaming:staleness=2,parts=1 mean",
    "own_edit": "local:period=4 / streaming:outer_gain=1 / async",
    "per_step_collective": "streaming",
    "prune": "local:period=4 / streaming",
    "skip_after_clip": "bsp none / bsp keep",
    "sparse": "bsp",
    "stalled_store": "no-strategy",
    "syncbn": "bsp / streaming / selsync",
    "teacher": "local:period=4 / streaming",
    "twins": "bsp skip / bsp order / streaming skip",
    "two_models": "bsp",
}
"""Arguments of each script, several times."""
ORDER = r"MismatchError: rank 0 steps optimizer 0 \(\w+\) at step \d, rank 1 steps optimizer 1"
CALLS = r"MismatchError: rank 0 is in {}\(\) after step 10, rank 1 is in {}\(\) after step 10"
ERRORS = {
    "gan bsp ranks": ORDER,
    "mismatched_calls bsp consensus save": CALLS.format("consensus", "offbeat.save"),
    "mismatched_calls streaming save consensus": CALLS.format("offbeat.save", "consensus"),
    "mismatched_calls streaming save finish": CALLS.format("offbeat.save", "finish"),
    "new_optimizer streaming": "AttachError: this SGD steps parameters of the attached model",
    "syncbn streaming": r"AttachError: module '1' is a SyncBatchNorm.*streaming.*BatchNorm",
    "syncbn selsync": r"AttachError: module '1' is a SyncBatchNorm.*selsync.*BatchNorm",
    "twins bsp skip": ORDER,
    "twins bsp order": ORDER,
    "two_models bsp": r".*nn.ModuleList\(\[…\]\) .* / model must .* nn.ModuleList\(\[generator",
}
"""The error on both workers, as a regular expression. The other commands raise none."""


@dataclass
class Facts:
    """What one worker found.

    Attributes:
        pairs: Values, each with the right one.
        local: A tensor of this worker before it is averaged.
        means: The same tensor when it is averaged.
        equal: Tensors with equal bits on all workers.
        error: Class and text of the error.
    """

    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    local: Tensor | None = None
    means: list[Tensor] = field(default_factory=list)
    equal: list[Tensor] = field(default_factory=list)
    error: str = ""


def facts_of(rank: int, size: int, command: str) -> Facts:
    name, *arguments = command.split()
    try:
        return globals()[name](rank, *arguments)
    except offbeat.OffbeatError as error:
        dist.barrier()  # the other worker has to find the same error before this process ends
        return Facts(error=f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "command", [f"{name} {each}" for name in COMMANDS for each in COMMANDS[name].split(" / ")]
)
def test_script(command: str) -> None:
    """It finds the right values, or it ends in the right error on both workers."""
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    # Messages in flight move parameters and buffers by a part of their difference.
    atol = 0.05 if re.search("streaming|async", command) else 1e-6
    first, second = results = run(facts_of, command, workers=2)
    for facts in results:
        assert re.match(ERRORS.get(command, "$"), facts.error), facts.error
        assert facts.error or facts.pairs or facts.equal
        for found, right in facts.pairs:
            close(found, right)
        for mean in facts.means:
            assert not torch.equal(first.local, second.local)
            close(mean, (first.local + second.local) / 2, atol=atol)
        assert all(map(torch.equal, facts.equal, first.equal))


# -- parts of scripts ------------------------------------------------------------------------------


def layers(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them, equal on all workers."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for inputs, outputs in itertools.pairwise(widths):
        model.extend([nn.Linear(inputs, outputs), nn.Tanh()])
    return model[:-1]


def normal(rank: int) -> Callable[..., Tensor]:
    """Return ``torch.randn`` with the random numbers of this worker."""
    return functools.partial(torch.randn, generator=torch.Generator().manual_seed(100 + rank))


def step(optimizer: Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, strategy: str, model: nn.Module, steps: int = 42) -> Any:
    """Return the synchronizer after a training."""
    sync, randn = attach(model, optimizer := sgd(model, 0.01), strategy), normal(rank)
    for _ in range(steps):
        step(optimizer, model(randn(4, 8)).square().mean())
    return sync


def shown(sync: Any, model: nn.Module, read: Callable[[], Tensor]) -> Facts:
    """End the training. A consensus and the end show the mean of what ``read`` returns."""
    local = read().clone()
    with sync.consensus():
        inside = read().clone()
    sync.finish()
    return Facts([(inside, read())], local, [inside, read()], [all_numbers(model)])


def as_with_ddp(steps: int) -> Callable[..., Callable[..., Facts]]:
    """Train with DDP, where ``attach`` does nothing, and under a strategy."""

    def decorate(train: Callable[..., list[Any]]) -> Callable[..., Facts]:
        def both(rank: int, strategy: str, *arguments: str) -> Facts:
            plain = SimpleNamespace(step=steps, finish=lambda: None)
            right = train(rank, lambda *given, **options: plain, *arguments)
            under = functools.partial(attach, strategy=strategy)
            found = train(rank, under, *arguments)
            return Facts([(found, right)], equal=found[:1])

        return both

    return decorate


# -- scripts ---------------------------------------------------------------------------------------


def bn_leftover(rank: int, strategy: str) -> Facts:
    """Three micro-batches follow the last step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    sync, randn = attach(model, optimizer := sgd(model), strategy), normal(rank)
    for i in range(83):
        model(randn(16, 8) * (1 + 4 * rank)).square().mean().backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return shown(sync, model, lambda: torch.stack([*model[1].buffers()][:2]))


def builtin_print(rank: int, strategy: str) -> Facts:
    """The script replaces ``print``, so that numba cannot be imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "numba"]:
        del sys.modules[name]
    kernels.cache_clear()

    def print(*values: object, **options: Any) -> None:
        pass

    builtins.print = print
    with TestCase().assertLogs("offbeat") as logs:
        train(rank, strategy, model := layers(8, 8)).finish()
    (reason,) = (text for text in logs.output if "numba" in text)
    named = "has no attribute 'print'" in reason and "OFFBEAT_KERNELS=0" in reason
    return Facts([(kernels(), None), (named, True)], equal=[flat(model)])


@as_with_ddp(steps=20)
def clip_titan(rank: int, attach: Any) -> list[Any]:
    """The script clips by the two halves of ``clip_grad_norm_``."""
    model, randn, norms = layers(8, 16, 1), normal(rank), []
    wrapped, optimizer = DistributedDataParallel(model), sgd(model, 0.5)
    sync = attach(wrapped, optimizer)
    for _ in range(20):
        mse_loss(wrapped(randn(8, 8) * (1 + 3 * rank)), randn(8, 1)).backward()
        norms.append(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        clip_grads_with_norm_(model.parameters(), 0.1, norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    sync.finish()
    return [flat(model), sync.step, norms]


def own_edit(rank: int, strategy: str, edit: Any = lambda w, rank: w.add_(0.5 * rank)) -> Facts:
    """The script edits the parameters after the last step, by another amount on each rank."""
    sync = train(rank, strategy, model := layers(8, 64), steps=20)
    sync.mean(0.0)  # otherwise the edit of one worker may land on the other before its own edit
    with torch.no_grad():
        edit(model[0].weight, rank)
    return shown(sync, model, model[0].weight.detach)


def consensus_then_finish(rank: int, strategy: str) -> Facts:
    return own_edit(rank, strategy, lambda weight, rank: weight.clamp_(min=0.1 * rank))


def constraint(rank: int, strategy: str) -> Facts:
    """The script clamps the weights after each step."""
    model, randn, target = layers(64, 64), normal(rank), 0.2 * normal(9)(64, 64)
    sync = attach(model, optimizer := sgd(model, 0.3), strategy)
    for _ in range(42):
        x = randn(16, 64)
        step(optimizer, mse_loss(model(x), x @ target))
        with torch.no_grad():
            model[0].weight.clamp_(min=0)
    facts = shown(sync, model, model[0].weight.detach)
    if "local" not in strategy:
        facts.means = []  # BSP: the workers do not differ. Streaming: what is in flight moves them.
    if strategy != "streaming":  # where the script has to clamp the mean again
        facts.pairs.append((model[0].weight.min().item(), 0.0))
    return facts


def gan(rank: int, strategy: str, how: str) -> Facts:
    """WGAN-GP: the number of critic steps varies in time, or between the ranks."""
    g, d, randn = layers(4, 300, 8), layers(8, 300, 1), normal(rank)
    og, od = (Adam(network.parameters(), 1e-3) for network in (g, d))
    sync = attach(nn.ModuleList([g, d]), [og, od], strategy)
    for i in range(10):
        for _ in range(3 + rank if how == "ranks" else 7 if i < 2 else 3):
            real, fake = randn(8, 8) + 1, g(randn(8, 4)).detach()
            mix = (0.5 * real + 0.5 * fake).requires_grad_()
            (slope,) = torch.autograd.grad(d(mix).sum(), mix, create_graph=True)
            penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
            od.zero_grad()
            step(od, d(fake).mean() - d(real).mean() + penalty)
        step(og, -d(g(randn(8, 4))).mean())
    sync.finish()
    return Facts([(sync.step, 10)], equal=[flat(g), flat(d)])


def join(rank: int, strategy: str) -> Facts:
    """The script keeps ``with ddp.join():`` for uneven data."""
    model, randn = layers(8, 2), normal(rank)
    wrapper, optimizer = DistributedDataParallel(model), sgd(model)
    sync = attach(wrapper, optimizer, strategy)
    with wrapper.join():
        for _ in range([30, 20][rank]):
            step(optimizer, wrapper(randn(4, 8)).square().mean())
    sync.finish()
    restored = wrapper.join.__func__ is DistributedDataParallel.join
    return Facts([(sync.step, [30, 20][rank]), (restored, True)], equal=[flat(model)])


def lazy_buffer(rank: int, strategy: str, how: str) -> Facts:
    """A buffer is None until the first forward pass, or registered there, or replaced."""
    model = layers(8, 2)
    if how != "register":
        model.register_buffer("mean", torch.zeros(8) if how == "rebind" else None)

    def centre(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        now = inputs[0].mean(0) + 5 * rank
        if "mean" not in module._buffers:
            module.register_buffer("mean", now)
        module.mean = now if module.mean is None else 0.9 * module.mean + 0.1 * now
        return inputs[0] - module.mean

    model.register_forward_pre_hook(centre)
    return shown(train(rank, strategy, model), model, lambda: model.get_buffer("mean"))


def min_resize(rank: int, strategy: str) -> Facts:
    """A buffer gets its size in the first forward pass, as in the observers of torch.ao."""
    model = layers(8, 8)
    model.register_buffer("largest", torch.tensor([]))

    def observe(module: nn.Module, inputs: tuple[Tensor]) -> None:
        module.get_buffer("largest").resize_(8).copy_(model[0].weight.detach().abs().amax(1))

    model.register_forward_pre_hook(observe)
    return shown(train(rank, strategy, model), model, lambda: model.get_buffer("largest"))


def mismatched_calls(rank: int, strategy: str, *calls: str) -> Facts:
    """Each rank calls something else."""
    sync = train(rank, strategy, layers(8, 20), steps=10)
    with TemporaryDirectory() as folder:
        save = functools.partial(offbeat.save, folder, sync)
        consensus = sync.consensus().__enter__
        {"consensus": consensus, "finish": sync.finish, "save": save}[calls[rank]]()
    return Facts()


@as_with_ddp(steps=20)
def n_critic(rank: int, attach: Any) -> list[Any]:
    """WGAN: the critic takes five steps for each of the generator."""
    g, d = map(DistributedDataParallel, (layers(8, 32, 16), layers(16, 32, 1)))
    (og, od), randn = (RMSprop(each.parameters(), 1e-3) for each in (g, d)), normal(rank)
    sync = attach(networks := nn.ModuleList([g, d]), [od, og])
    for i in range(100):
        real, z = randn(16, 16) + 1, randn(16, 8)
        od.zero_grad()
        step(od, d(g(z).detach()).mean() - d(real).mean())
        if i % 5 == 4:
            step(og, -d(g(z)).mean())
    sync.finish()
    return [flat(networks), sync.step]


def new_optimizer(rank: int, strategy: str) -> Facts:
    """The script builds another optimizer for its second phase."""
    sync = train(rank, strategy, model := layers(8, 32, 2))
    step(sgd(model), model(torch.ones(1, 8)).sum())
    return Facts([(sync.step, 42)])


@as_with_ddp(steps=40)
def overflow_one_rank(rank: int, attach: Any, wire: str, *clip: str) -> list[Any]:
    """Each tenth loss of rank 1 overflows, and both ranks skip the step."""
    model, randn = layers(64, 256, 10), normal(rank)
    wrapped, optimizer = DistributedDataParallel(model), SGD(model.parameters(), 0.05, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    sync = attach(wrapped, optimizer, scaler=scaler, wire=wire)
    for i in range(40):
        loss = (wrapped(randn(8, 64)) - 1).square().mean()
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss * (float("inf") if rank and i % 10 == 5 else 1)).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    scale = scaler.get_scale()
    sync.finish()
    loss = (model(normal(9)(256, 64)) - 1).square().mean()
    return [flat(model) if wire == "float32" else loss.detach().round(decimals=2), sync.step, scale]


def own_collective(rank: int, strategy: str, *mean: str) -> Facts:
    """An all-reduce ends an epoch, in which rank 1 has more steps, perhaps after ``sync.mean``."""
    model, randn = layers(8, 10), normal(rank)
    seconds = 20 if mean else 2
    sync = attach(model, optimizer := sgd(model), strategy, group=Quick(), timeout_seconds=seconds)

    def epoch() -> None:
        for _ in range([2, 40][rank]):
            step(optimizer, model(randn(8, 8)).square().mean())

    _, error = error_of(epoch)
    if mean:
        sync.mean(0.0)
    dist.all_reduce(total := torch.tensor(float(rank)))
    expected = "nothing was raised" if mean or not rank else "use sync.mean(), or call it inside"
    return Facts([(total.item(), 1.0), (expected in error, True)])


def per_step_collective(rank: int, strategy: str) -> Facts:
    """The script reduces its loss in each step. The page says that this makes it slow."""
    model, randn, losses, means = layers(64, 256, 10), normal(rank), [], []
    wrapped, optimizer = DistributedDataParallel(model), sgd(model)
    sync = attach(wrapped, optimizer, strategy)
    for _ in range(100):
        loss = wrapped(randn(8, 64)).square().mean()
        step(optimizer, loss)
        dist.all_reduce(total := loss.detach().clone())
        losses.append(loss.detach())
        means.append(total / 2)
    sync.finish()
    return Facts([(sync.step, 100)], torch.stack(losses), [torch.stack(means)], [flat(model)])


def prune(rank: int, strategy: str) -> Facts:
    """Each rank prunes other weights in the middle of the training."""
    model, randn = layers(32, 32, 2), normal(rank)
    sync = attach(model, optimizer := sgd(model, 0.3), strategy)
    for i in range(80):
        x = randn(16, 32)
        step(optimizer, cross_entropy(model(x), (x[:, rank] > 0).long()))
        if i == 41:
            l1_unstructured(model[0], "weight", amount=0.5)
    return shown(sync, model, lambda: model.get_buffer("0.weight_mask"))


@as_with_ddp(steps=27)
def skip_after_clip(rank: int, attach: Any, how: str) -> list[Any]:
    """The script clips, and skips the step if the norm was large."""
    model, randn = layers(8, 16, 1), normal(rank)
    wrapped, optimizer = DistributedDataParallel(model), sgd(model, 0.1)
    sync = attach(wrapped, optimizer)
    for i in range(30):
        large = i in (3, 4, 11)
        x, y = randn(8, 8) * (30 if large else 1), randn(8, 1) + rank + 100 * large
        mse_loss(wrapped(x), y).backward()
        if clip_grad_norm_(model.parameters(), 1.0) < 50:
            optimizer.step()
        optimizer.zero_grad(set_to_none=how == "none")
    sync.finish()
    return [flat(model), sync.step]


@as_with_ddp(steps=20)
def sparse(rank: int, attach: Any) -> list[Any]:
    """A sparse table, of which rank 1 reads only the padding now and then, and an unused one."""
    torch.manual_seed(0)
    sparse = isinstance(attach, functools.partial)  # and dense with DDP
    table, unused = (nn.Embedding(50, 4, padding_idx=0, sparse=sparse) for _ in range(2))
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(12, 2))
    model[1].register_module("unused", unused)
    wrapped: Any = DistributedDataParallel(model, find_unused_parameters=True)
    generator = torch.Generator().manual_seed(rank)
    sync = attach(wrapped, optimizer := sgd(model, 0.1))
    for i in range(20):
        for _ in range(2):
            x = torch.randint(1, 50, (4, 3), generator=generator) * (not rank or i % 3 != 1)
            cross_entropy(wrapped(x), x[:, 0] % 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.finish()
    return [flat(model), sync.step]


def stalled_store(rank: int, strategy: str) -> Facts:
    """Someone sends one byte to the store, and nothing more."""
    kept = serve(listen("127.0.0.1", 0))
    limit = timedelta(seconds=20)
    client = dist.TCPStore("127.0.0.1", kept.port, None, False, limit)
    with socket.create_connection(("127.0.0.1", kept.port), 20) as other:
        other.sendall(b"\0")
        return Facts([(call_within(20, lambda: client.add("key", 1)), 1)])


def syncbn(rank: int, strategy: str) -> Facts:
    model = nn.Sequential(layers(4, 4), nn.BatchNorm1d(4))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    attach(model, sgd(model), strategy).finish()
    return Facts(equal=[all_numbers(model)])


def teacher(rank: int, strategy: str) -> Facts:
    """Mean teacher: a frozen part follows the trained part after each step."""
    model = nn.Sequential(layers(16, 16), layers(16, 16).requires_grad_(False))
    optimizer, randn = SGD(model[0].parameters(), 0.3), normal(rank)
    sync = attach(model, optimizer, strategy)
    for _ in range(62):
        x = randn(8, 16) + rank
        step(optimizer, mse_loss(model[0](x), model[1](x.roll(1, 1)).detach() + x))
        for p, q in zip(model[0].parameters(), model[1].parameters(), strict=True):
            q.data.mul_(0.9).add_(p.data, alpha=0.1)
    return shown(sync, model, lambda: flat(model[1]))


def twins(rank: int, strategy: str, how: str) -> Facts:
    """Rank 1 steps two networks of equal size in the other order, or skips one of them once."""
    a, b = (nn.Linear(8, 1, bias=False) for _ in range(2))
    optimizers = [sgd(a, 0.1), sgd(b, 0.1)]
    sync = attach(nn.ModuleList([a, b]), optimizers, strategy)
    for i in range(150):
        pairs = [(a.weight, 1.0, optimizers[0]), (b.weight, -1.0, optimizers[1])]
        if rank and (how == "order" or i == 3):
            pairs = pairs[::-1] if how == "order" else pairs[1:]
        for weight, target, optimizer in pairs:
            step(optimizer, (weight - target).square().sum() / 2)
    sync.finish()
    found = torch.cat([a.weight, b.weight]).detach().round(decimals=1)
    return Facts([(found, torch.tensor([[1.0], [-1.0]]).expand(2, 8))])


def two_models(rank: int, strategy: str) -> Facts:
    """What the error says if a script gives the networks of a GAN in another way."""
    g, d = layers(4, 4), layers(4, 1)
    optimizers = [sgd(g), sgd(d)]
    attach(nn.ModuleList([g, d]), optimizers, strategy).finish()
    wrong: list[Any] = [g, [g, d]]
    texts = [error_of(lambda m=m: attach(m, optimizers, strategy))[1] for m in wrong]
    return Facts(error=" / ".join(texts))
