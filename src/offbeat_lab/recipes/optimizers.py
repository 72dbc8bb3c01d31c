"""The optimizers that can replace the one of a recipe: SGD, AdamW and Muon."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from typing_extensions import override

from offbeat_lab.options import OptimizerName


class MuonWithAdamW(Optimizer):
    """Muon for the hidden matrices of a model, AdamW for all other parameters.

    One optimizer with two parameter groups, so that schedules, checkpoints and strategies handle it
    like any other. Both groups have the same learning rate: the update of Muon is scaled to the RMS
    of an update of AdamW (``adjust_lr_fn="match_rms_adamw"``).

    Args:
        hidden: Parameters for Muon, all 2-D.
        others: Parameters for AdamW.
        lr: Learning rate.
        weight_decay: Decoupled weight decay of both groups.
        adamw: Further arguments of AdamW, such as ``betas``.
    """

    def __init__(
        self,
        hidden: list[Tensor],
        others: list[Tensor],
        *,
        lr: float,
        weight_decay: float,
        **adamw: Any,
    ) -> None:
        muon = Muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        # In a list, so that attach() does not take them for wrapped optimizers.
        self._optimizers = [muon, AdamW(others, lr=lr, weight_decay=weight_decay, **adamw)]
        super().__init__([group for one in self._optimizers for group in one.param_groups], {})

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer, group in zip(self._optimizers, self.param_groups, strict=True):
            # load_state_dict() has replaced both.
            optimizer.param_groups, optimizer.state = [group], self.state
            optimizer.step()
        return loss


_KINDS: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW, "muon": MuonWithAdamW}


def with_optimizer(name: OptimizerName, model: nn.Module, own: Optimizer) -> Optimizer:
    """Return ``own``, the optimizer of a recipe, if it is of the named kind; else a new optimizer.

    A new AdamW and Muon take learning rate, betas, ε and weight decay from ``own`` if that is Adam
    or AdamW. Otherwise the learning rate is 0.001 (that of a new SGD 0.05 with momentum 0.9), and
    the rest has torch's defaults.

    Args:
        name: Kind of optimizer.
        model: The model.
        own: The optimizer of the recipe. The new optimizer has the same parameters.
    """
    if isinstance(own, _KINDS[name]):
        return own
    if len(own.param_groups) > 1:
        raise ValueError(
            f"optimizer {name}: the recipe's {type(own).__name__} has {len(own.param_groups)} "
            "parameter groups, whose settings would be lost; leave it out"
        )
    parameters: list[Tensor] = [*own.param_groups[0]["params"]]
    if name == "sgd":
        return SGD(parameters, lr=0.05, momentum=0.9)
    settings: dict[str, Any] = {"lr": 0.001, "weight_decay": 0.01}
    if isinstance(own, Adam):
        names = ("lr", "weight_decay", "betas", "eps", "fused")
        settings = {each: own.defaults[each] for each in names}
    if name == "adamw":
        return AdamW(parameters, **settings)
    outer = _outer_layers(model)
    hidden = [p for p in parameters if p.dim() == 2 and id(p) not in outer]
    if not hidden:
        raise ValueError(
            "optimizer muon: the model has no hidden matrix, a 2-D parameter other than embeddings "
            "and the last linear layer; leave it out"
        )
    chosen = {id(p) for p in hidden}
    others = [p for p in parameters if id(p) not in chosen]
    return MuonWithAdamW(hidden, others, **settings)


def _outer_layers(model: nn.Module) -> set[int]:
    """Return the ids of the weights of all embeddings and of the last linear layer."""
    modules = [*model.modules()]
    embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linear = [m for m in modules if isinstance(m, nn.Linear)][-1:]
    return {id(module.weight) for module in (*embeddings, *linear)}
