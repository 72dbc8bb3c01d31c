"""Reference of PowerSGD in numpy, written without Offbeat, like ``references``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from problems import PARAMETERS, gradients, make_batch
from strategies.references import BSP

Array = np.ndarray[Any, np.dtype[np.float64]]


def first_q(position: int, columns: int, rank: int) -> Array:
    """The first Q of the parameter at this position, of the first optimizer."""
    random = np.random.default_rng([int.from_bytes(b"powersgd", "big"), 0, position])
    return random.standard_normal((columns, rank))


class LowRank:
    """PowerSGD of one matrix of several workers, by Algorithm 1 with Gram-Schmidt.

    Attributes:
        q: Q.
        errors: e of each worker.
        matrices: M of each worker in the last step, or None if it did not step.
    """

    def __init__(self, q: Array, rows: int, workers: int) -> None:
        self.q = q.copy()
        self.errors = [np.zeros((rows, len(q))) for _ in range(workers)]
        self.matrices: list[Array | None] = []

    def mean(self, gradients: Sequence[Array | None]) -> Array:
        """One step with a gradient of each worker, or None if it does not step."""
        self.matrices = [
            None if g is None else g + e for g, e in zip(gradients, self.errors, strict=True)
        ]
        present = [m for m in self.matrices if m is not None]
        p = sum(m @ self.q for m in present) / len(present)
        for i in range(p.shape[1]):
            p[:, i] -= p[:, :i] @ (p[:, :i].T @ p[:, i])
            p[:, i] /= np.sqrt((p[:, i] ** 2).sum())
        self.q = sum(m.T @ p for m in present) / len(present)
        mean: Array = p @ self.q.T
        self.errors = [
            e if m is None else m - mean for e, m in zip(self.errors, self.matrices, strict=True)
        ]
        return mean


class PowerSGD(BSP):
    """One model, which steps with the low-rank mean of the gradients of those that step."""

    def __init__(self, counts: Sequence[int], kind: str, *, rank: int = 4) -> None:
        super().__init__(counts, kind)
        shapes = {i: tuple(p.shape) for i, p in enumerate(self.model.parameters()) if p.dim() == 2}
        self.compressed = {
            i: LowRank(first_q(i, m, rank), n, self.size)
            for i, (n, m) in shapes.items()
            if (n + m) * rank < n * m and self.size > 1
        }
        sizes = [(len(each.errors[0]), len(each.q)) for each in self.compressed.values()]
        self.first = rank * sum(n for n, _ in sizes)  # numbers of all P
        self.second = PARAMETERS - sum(n * m for n, m in sizes) + rank * sum(m for _, m in sizes)
        self.exact_only = not self.compressed

    def advance(self) -> bool:
        each: list[list[Tensor] | None] = [
            gradients(self.model, make_batch(n, self.time - 1)) if n in self.stepping else None
            for n in range(self.size)
        ]
        for i, p in enumerate(self.model.parameters()):
            of_workers = [None if g is None else g[i] for g in each]
            if i in self.compressed:
                arrays = [None if g is None else g.numpy() for g in of_workers]
                p.grad = torch.from_numpy(self.compressed[i].mean(arrays))
            else:
                present = [g for g in of_workers if g is not None]
                p.grad = sum(present) / len(present)
        self.optimizer.step()
        self.numbers += self.vote_numbers
        self.numbers += PARAMETERS if self.exact_only else self.first + self.second
        return True

    def last_numbers(self) -> int:
        """The last round sends zeros for P, and then nobody needs Q."""
        return PARAMETERS if self.exact_only else self.first
