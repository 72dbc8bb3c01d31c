"""``--optimizer``: an optimizer in place of the recipe's, for every method."""

import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from lab import tiny
from offbeat import Compute, Network
from offbeat_lab.compare import run_and_record
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.recipes import Setup, find_recipe
from offbeat_lab.recipes.models.transformers import ByteTransformer
from offbeat_lab.recipes.optimizers import MuonWithAdamW, with_optimizer

PLACE = VirtualCluster(Network("1Gbit/s"), Compute("10ms"))
JOB = Job("tiny", "bsp", 2, evaluations=tiny.STEPS)


def ignore(event: object) -> None:
    """Ignore an event."""


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def muon_for(model: nn.Module, own: Optimizer | None = None) -> Optimizer:
    return with_optimizer("muon", model, own or AdamW(model.parameters(), lr=0.02))


# -- the optimizer ---------------------------------------------------------------------------------


def test_it_is_torchs_muon_and_adamw_to_the_last_bit() -> None:
    """Over several steps, a changed rate, and a state that was saved and loaded."""
    model, other = small_model(), small_model()
    own = AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer = muon_for(model, own)
    hidden = [other[0].weight, other[2].weight]
    rest = [p for p in other.parameters() if not any(p is h for h in hidden)]
    pair: list[Optimizer] = [
        Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ]
    for step in range(6):
        if step == 3:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            optimizer = muon_for(model)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        for one in (optimizer, *pair):
            for group in one.param_groups:
                group["lr"] = 0.02 / (1 + step)
        for trained in (model, other):
            gradients(trained, step)
        optimizer.step()
        for one in pair:
            one.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def names_for_muon(model: nn.Module) -> list[str]:
    optimizer = muon_for(model)
    assert isinstance(optimizer, MuonWithAdamW)
    names = {id(p): name for name, p in model.named_parameters()}
    hidden, others = ([names[id(p)] for p in g["params"]] for g in optimizer.param_groups)
    assert sorted(hidden + others) == sorted(names.values())
    return hidden


def test_muon_gets_the_hidden_matrices() -> None:
    """Not embeddings, the output layer, convolutions, norms or biases; tied weights count once."""
    layers = ["self_attn.in_proj_weight", "self_attn.out_proj.weight"]
    layers += ["linear1.weight", "linear2.weight"]
    model = ByteTransformer(context=8, width=16)
    want = [f"blocks.{block}.{layer}" for block in (0, 1) for layer in layers]
    assert names_for_muon(model) == want
    model.head.weight = model.bytes.weight
    assert names_for_muon(model) == want
    assert names_for_muon(find_recipe("digits").build(Setup(1, 1)).model) == ["8.weight"]


def test_settings_are_those_of_an_adam_and_defaults_otherwise() -> None:
    model = small_model()
    adam = Adam(model.parameters(), lr=0.3, betas=(0.5, 0.6), eps=0.1, weight_decay=0.2)
    muon, rest = muon_for(model, adam).param_groups
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.3, 0.2, 0.95)
    assert (rest["lr"], rest["weight_decay"], rest["betas"]) == (0.3, 0.2, (0.5, 0.6))
    assert rest["eps"] == 0.1
    sgd = SGD(model.parameters(), lr=0.3, weight_decay=0.2)
    for name in ("adamw", "muon"):
        for group in with_optimizer(name, model, sgd).param_groups:  # type: ignore[arg-type]
            assert (group["lr"], group["weight_decay"]) == (0.001, 0.01)
    (group,) = with_optimizer("sgd", model, adam).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.05, 0.9, 0)
    assert with_optimizer("sgd", model, sgd) is sgd
    assert isinstance(with_optimizer("adamw", model, adam), AdamW)


# -- tasks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["digits", "stdlib-lm"])
def test_the_schedule_of_a_recipe_moves_the_rates_of_both_groups(name: str) -> None:
    task = find_recipe(name).build(Setup(4, 1, optimizer="muon"))
    own = find_recipe(name).build(Setup(4, 1))
    assert isinstance(task.optimizer, MuonWithAdamW)
    assert task.steps == own.steps
    first, (own_group,) = task.optimizer.param_groups[0]["lr"], own.optimizer.param_groups
    factor = first / own_group["lr"]
    for _ in range(3):
        for one in (task, own):
            one.optimizer.step()
            one.advance()
        for group in task.optimizer.param_groups:
            assert group["lr"] == pytest.approx(factor * own_group["lr"])
    rate = task.optimizer.param_groups[0]["lr"]
    assert rate != first
    task.complete(Setup(4, 1, optimizer="muon"))  # as the decorator ``recipe`` may do again
    assert task.optimizer.param_groups[0]["lr"] == rate


CUSTOM = """
import torch
from torch import nn
from offbeat_lab import Task, accuracy, recipe

@recipe(metric="accuracy", target=0.9, epochs=1)
def custom(setup):
    data = [(torch.ones(4), 0)] * 32
    model = {model}
    optimizer = torch.optim.SGD({groups}, lr=0.1)
    return Task(
        model, optimizer, data, 4, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
        accuracy(data, {{"accuracy": 1}}), scheduler={scheduler},
    )
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "nn.Linear(4, 2)"}, "optimizer muon: the model has no hidden matrix"),
        (
            {"groups": "[{'params': [p]} for p in model.parameters()]"},
            "optimizer muon: the recipe's SGD has 4 parameter groups",
        ),
        (
            {"scheduler": "torch.optim.lr_scheduler.StepLR(optimizer, 1)"},
            "optimizer muon: the recipe's scheduler belongs to its own optimizer; give Task a",
        ),
    ],
)
def test_a_task_that_does_not_fit_is_refused_before_the_run(
    change: dict[str, str], message: str, tmp_path: Path
) -> None:
    parts = {
        "model": "nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))",
        "groups": "model.parameters()",
        "scheduler": "lambda o, steps: torch.optim.lr_scheduler.StepLR(o, steps)",
    }
    for name, settings in (("right", parts), ("wrong", {**parts, **change})):
        (tmp_path / f"{name}.py").write_text(CUSTOM.format(**settings))
    task = Job(str(tmp_path / "right.py"), "bsp --optimizer muon", 2).under("bsp").check()
    Job(str(tmp_path / "right.py"), "bsp", 2, optimizer="muon").check(task)
    job = Job(str(tmp_path / "wrong.py"), "bsp", 2)
    task = job.check()
    with pytest.raises(ValueError, match=message) as caught:
        job.under("bsp --optimizer muon").check(task)
    assert "\n" not in str(caught.value)


# -- runs ------------------------------------------------------------------------------------------


def curve(text: str) -> list[float]:
    result = run_and_record(JOB.under(text), ignore, PLACE)
    return [point.metric for point in result.points]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_ideal_and_bsp_with_the_same_optimizer_are_equal(name: str) -> None:
    bsp = curve(f"bsp --optimizer {name}")
    assert curve(f"ideal --optimizer {name}") == bsp
    assert curve(f"bsp --optimizer {name} --lr-scale 2") != pytest.approx(bsp, rel=1e-3)
    assert curve("bsp") != pytest.approx(bsp, rel=1e-3)
