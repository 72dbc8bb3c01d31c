"""Partitions for non-IID training: the label of a sample decides which worker holds it."""

import heapq
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from offbeat.extend import POSITIVE, require_integer, require_number

Indices: TypeAlias = npt.NDArray[np.int64]
"""Sample indices of one worker or of one label, as an array."""

_BY_LABEL, _DIRICHLET = 1, 2  # generators are seeded by (seed, purpose); these are the purposes
_DRAWS = 1000  # largest number of attempts to give every worker a sample


def partition_by_label(
    labels: Tensor, workers: int, labels_per_worker: int, seed: int = 0
) -> list[Indices]:
    """Divide samples so that each worker holds exactly ``labels_per_worker`` different labels.

    For example, with as many workers as labels and ``labels_per_worker=1``, each worker holds all
    samples of one label. The workers that hold samples of a label are its *holders*.

    1. Choose the number of holders of each label. Every label gets one holder. Each further holder
       goes to the label that has the most samples per holder, so that the parts have similar sizes.
       No label gets more holders than it has samples, or than there are workers.
    2. Choose the holders. The labels are processed in random order. Each label takes the workers
       that lack the most labels; ties are broken at random.
    3. Shuffle the samples of each label and split them evenly among the label's holders.

    Args:
        labels: Integer label of each sample, of shape [samples].
        workers: Number of parts N (≥ 1).
        labels_per_worker: Number of different labels in each part, from 1 to the number of labels.
        seed: Seed of the division. The same seed gives the same parts on every worker.

    Returns:
        N ascending arrays of sample indices. Every index is in exactly one of them.

    Raises:
        ValueError: An argument is out of its range, or no such division exists.
    """
    groups = group_by_label(labels)
    require_integer("labels_per_worker", labels_per_worker, least=1)
    known, places = len(groups), workers * labels_per_worker
    if labels_per_worker > known:
        raise ValueError(
            f"labels_per_worker must be at most the number of different labels, which is {known}, "
            f"got {labels_per_worker}"
        )
    if places < known:
        raise ValueError(
            f"{workers} workers with {labels_per_worker} labels each hold at most {places} of the "
            f"{known} labels; raise labels_per_worker to {-(-known // workers)} or workers to "
            f"{-(-known // labels_per_worker)}"
        )
    limits = [min(workers, len(samples)) for samples in groups]
    if places > sum(limits):
        raise ValueError(
            f"{workers} workers with {labels_per_worker} labels each need {places} holders of "
            f"labels, but labels with few samples allow only {sum(limits)}; lower "
            "labels_per_worker or workers"
        )
    random = np.random.default_rng([seed, _BY_LABEL])
    order = random.permutation(known)
    holders = _count_holders([len(samples) for samples in groups], limits, places, order)
    lacking = np.full(workers, labels_per_worker)
    parts: list[list[Indices]] = [[] for _ in range(workers)]
    for label in order:
        # This choice keeps the numbers of lacking labels within 1 of each other, so every label
        # finds enough workers that lack one.
        chosen = np.lexsort((random.random(workers), -lacking))[: holders[label]]
        lacking[chosen] -= 1
        shares = np.array_split(random.permutation(groups[label]), len(chosen))
        for worker, share in zip(chosen, shares, strict=True):
            parts[worker].append(share)
    return [np.sort(np.concatenate(part)) for part in parts]


def partition_dirichlet(labels: Tensor, workers: int, alpha: float, seed: int = 0) -> list[Indices]:
    """Divide the samples of each label among the workers in proportions drawn from Dirichlet(α).

    For each label k with n_k samples, N workers and worker j:

        p_k ~ Dirichlet(α, …, α)        N numbers that sum to 1
        size_kj = p_kj·n_k              rounded by largest remainder, ties broken at random

    Worker j gets size_kj samples of label k, drawn at random. A smaller α makes the workers more
    different: α → 0 gives each label to one worker, and α → ∞ gives all workers the same
    distribution of labels. The sizes of the parts differ, too. If a part is empty, p is drawn again
    for all labels, at most 1000 times.

    *Differs from the papers*: in the published code of Yurochkin et al., a worker that already
    holds 1/N of the samples gets no samples of the remaining labels. Hsu et al. draw a distribution
    of labels for each worker, not of workers for each label, and give all workers the same number
    of samples.

    Args:
        labels: Integer label of each sample, of shape [samples].
        workers: Number of parts N (≥ 1).
        alpha: Concentration α (> 0).
        seed: Seed of the division. The same seed gives the same parts on every worker.

    Returns:
        N ascending arrays of sample indices. Every index is in exactly one of them.

    Raises:
        ValueError: An argument is out of its range, or no draw gave every worker a sample.

    Source: Yurochkin et al., ICML 2019, arXiv 1905.12022, heterogeneous partition of the
    experiments. Variant that draws the labels of each worker: Hsu, Qi & Brown 2019, arXiv
    1909.06335.
    """
    groups = group_by_label(labels)
    require_number("alpha", alpha, POSITIVE)
    counts = np.array([len(samples) for samples in groups])
    if workers > counts.sum():
        raise ValueError(f"{workers} workers need {workers} samples, got {counts.sum()}")
    random = np.random.default_rng([seed, _DIRICHLET])
    for _ in range(_DRAWS):
        sizes = round_shares(_dirichlet(random, alpha, (len(groups), workers)), counts, random)
        if sizes.sum(axis=0).min() >= 1:
            break
    else:
        raise ValueError(
            f"none of {_DRAWS} draws gave each of {workers} workers a sample with alpha={alpha}; "
            "raise alpha or lower workers"
        )
    pieces = [
        np.split(random.permutation(samples), np.cumsum(of_label)[:-1])
        for samples, of_label in zip(groups, sizes, strict=True)
    ]
    return [np.sort(np.concatenate(part)) for part in zip(*pieces, strict=True)]


def group_by_label(labels: Tensor) -> list[Indices]:
    """Return the sample indices of each distinct label, in ascending order of the labels."""
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    _, inverse, counts = np.unique(labels.cpu().numpy(), return_inverse=True, return_counts=True)
    ordered = np.argsort(inverse, kind="stable").astype(np.int64)
    return np.split(ordered, np.cumsum(counts)[:-1])


def round_shares(
    shares: npt.NDArray[np.float64], totals: npt.NDArray[np.int64], random: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Round ``shares × totals`` to integers whose rows sum to ``totals``, by largest remainder.

    Args:
        shares: Non-negative shares of shape [rows, columns]. Each row sums to 1.
        totals: Sums of shape [rows].
        random: Breaks ties between equal remainders.
    """
    exact = shares * totals[:, None]
    sizes = np.floor(exact).astype(np.int64)
    missing = totals - sizes.sum(axis=1)
    order = np.lexsort((random.random(exact.shape), sizes - exact), axis=1)
    rank = np.argsort(order, axis=1)
    rounded: npt.NDArray[np.int64] = sizes + (rank < missing[:, None])
    return rounded


def _dirichlet(
    random: np.random.Generator, alpha: float, shape: tuple[int, int]
) -> npt.NDArray[np.float64]:
    """Draw rows from the symmetric Dirichlet(α).

    A row consists of Gamma(α) variables divided by their sum. For small α the variables underflow.
    The code therefore computes their logarithms, from Gamma(α) = Gamma(α + 1)·U^(1/α), where U is
    uniform and −log U is exponential.
    """
    alpha = float(np.clip(alpha, 1e-100, 1e100))  # avoids overflow; the shares are the same
    logs = np.log(random.standard_gamma(alpha + 1, shape))
    logs -= random.standard_exponential(shape) / alpha
    gammas = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares: npt.NDArray[np.float64] = gammas / gammas.sum(axis=1, keepdims=True)
    return shares


def _count_holders(
    counts: list[int], limits: list[int], places: int, order: npt.NDArray[np.intp]
) -> list[int]:
    """Return the number of holders of each label: step 1 of ``partition_by_label``.

    Label k has ``counts[k]`` samples and at most ``limits[k]`` holders. The numbers of holders sum
    to ``places``. ``order`` breaks ties.
    """
    holders = [1] * len(counts)
    queue = [(-counts[label], turn, label) for turn, label in enumerate(order.tolist())]
    heapq.heapify(queue)
    for _ in range(places - len(counts)):
        _, turn, label = heapq.heappop(queue)
        while holders[label] == limits[label]:
            _, turn, label = heapq.heappop(queue)
        holders[label] += 1
        heapq.heappush(queue, (-counts[label] / holders[label], turn, label))
    return holders
