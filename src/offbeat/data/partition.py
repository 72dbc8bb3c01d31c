"""Partitions for non-IID training: the label of a sample decides which worker holds it."""

import heapq
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from offbeat.arguments import POSITIVE, require_integer, require_number

Indices: TypeAlias = npt.NDArray[np.int64]
"""Sample indices of one worker, as an array."""
Labels: TypeAlias = Sequence[int] | Sequence[str] | npt.NDArray[Any] | torch.Tensor
"""Label of each sample."""
Part: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""Sample indices of one worker, as given by a caller."""

_BY_LABEL, _DIRICHLET = 1, 2  # generators are seeded by (seed, purpose); these are the purposes
_DRAWS = 1000  # largest number of attempts to satisfy ``minimum_samples``


def partition_by_label(
    labels: Labels, workers: int, labels_per_worker: int, seed: int = 0
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
        labels: Label of each sample, integers or strings: a one-dimensional list, array or tensor.
        workers: Number of parts N (≥ 1).
        labels_per_worker: Number of different labels in each part, from 1 to the number of labels.
        seed: Seed of the division. The same seed gives the same parts on every worker.

    Returns:
        N ascending arrays of sample indices. Every index is in exactly one of them.

    Raises:
        TypeError: ``labels`` has the wrong type, or a number is not an integer.
        ValueError: An argument is out of its range, or no such division exists.
    """
    values, groups = group_by_label(labels)
    _require_count("workers", workers)
    _require_count("labels_per_worker", labels_per_worker)
    known, places = len(values), workers * labels_per_worker
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
    random = np.random.default_rng([seed % 2**64, _BY_LABEL])
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


def partition_dirichlet(
    labels: Labels, workers: int, alpha: float, seed: int = 0, minimum_samples: int = 1
) -> list[Indices]:
    """Divide the samples of each label among the workers in proportions drawn from Dirichlet(α).

    For each label k with n_k samples, N workers and worker j:

        p_k ~ Dirichlet(α, …, α)        N numbers that sum to 1
        size_kj = p_kj·n_k              rounded by largest remainder, ties broken at random

    Worker j gets size_kj samples of label k, drawn at random. A smaller α makes the workers more
    different: α → 0 gives each label to one worker, and α → ∞ gives all workers the same
    distribution of labels. The sizes of the parts differ, too. If a part has fewer than
    ``minimum_samples`` samples, p is drawn again for all labels, at most 1000 times.

    *Differs from the papers*: in the published code of Yurochkin et al., a worker that already
    holds 1/N of the samples gets no samples of the remaining labels. Hsu et al. draw a distribution
    of labels for each worker, not of workers for each label, and give all workers the same number
    of samples.

    Args:
        labels: Label of each sample, integers or strings: a one-dimensional list, array or tensor.
        workers: Number of parts N (≥ 1).
        alpha: Concentration α (> 0).
        seed: Seed of the division. The same seed gives the same parts on every worker.
        minimum_samples: Smallest size of a part (≥ 1).

    Returns:
        N ascending arrays of sample indices. Every index is in exactly one of them.

    Raises:
        TypeError: ``labels`` has the wrong type, or another argument is not a number.
        ValueError: An argument is out of its range, or no draw gave every worker
            ``minimum_samples`` samples.

    Source: Yurochkin et al., ICML 2019, arXiv 1905.12022, heterogeneous partition of the
    experiments. Variant that draws the labels of each worker: Hsu, Qi & Brown 2019, arXiv
    1909.06335.
    """
    _, groups = group_by_label(labels)
    _require_count("workers", workers)
    _require_count("minimum_samples", minimum_samples)
    alpha = _plain(alpha)
    require_number("alpha", alpha, POSITIVE)
    counts = np.array([len(samples) for samples in groups])
    if workers * minimum_samples > counts.sum():
        raise ValueError(
            f"{workers} workers with at least {minimum_samples} samples each need "
            f"{workers * minimum_samples} samples, got {counts.sum()}; lower workers or "
            "minimum_samples"
        )
    random = np.random.default_rng([seed % 2**64, _DIRICHLET])
    for _ in range(_DRAWS):
        sizes = round_shares(_dirichlet(random, alpha, (len(groups), workers)), counts, random)
        if sizes.sum(axis=0).min() >= minimum_samples:
            break
    else:
        raise ValueError(
            f"none of {_DRAWS} draws gave each of {workers} workers at least {minimum_samples} "
            f"samples with alpha={alpha}; raise alpha, or lower workers or minimum_samples"
        )
    pieces = [
        np.split(random.permutation(samples), np.cumsum(of_label)[:-1])
        for samples, of_label in zip(groups, sizes, strict=True)
    ]
    return [np.sort(np.concatenate(part)) for part in zip(*pieces, strict=True)]


def group_by_label(labels: Labels) -> tuple[npt.NDArray[Any], list[Indices]]:
    """Return the distinct labels in ascending order, and the sample indices of each label."""
    try:
        array = _array(labels)
    except ValueError:
        raise ValueError(
            "labels must be one integer or string for each sample, got lists of different lengths"
        ) from None
    if array.dtype.kind in "OT" and all(isinstance(label, str) for label in array.flat):
        array = array.astype(np.str_)  # pandas stores strings in arrays of objects
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(
            "labels must be one integer or string for each of at least one sample, got shape "
            f"{list(array.shape)}"
        )
    if array.dtype.kind not in "iubU":
        raise TypeError(f"labels must be integers or strings, got {array.dtype}")
    values, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ordered = np.argsort(inverse, kind="stable").astype(np.int64)
    return values, np.split(ordered, np.cumsum(counts)[:-1])


def check_parts(parts: Sequence[Part], samples: int) -> list[Indices]:
    """Check that the parts hold distinct indices in [0, ``samples``). Return them as arrays."""
    checked = []
    for number, part in enumerate(parts):
        array = _array(part)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(
                f"part {number} must be a list of integer indices, got {array.dtype} of shape "
                f"{list(array.shape)}"
            )
        outside = array[(array < 0) | (array >= samples)]
        if outside.size:
            raise ValueError(
                f"part {number} must hold indices in [0, {samples}), got {outside[0]}; it was made "
                "for another dataset"
            )
        checked.append(array.astype(np.int64))
    times = np.bincount(np.concatenate([*checked, np.empty(0, np.int64)]), minlength=1)
    if times.max() > 1:
        raise ValueError(
            f"every index may occur only once in all parts, index {times.argmax()} occurs "
            f"{times.max()} times"
        )
    return checked


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


def _array(values: Sequence[Any] | npt.NDArray[Any] | torch.Tensor) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values)


def _require_count(name: str, value: int) -> None:
    require_integer(name, _plain(value), least=1)


def _plain(number: Any) -> Any:
    """Convert a scalar of NumPy or torch to a Python number. Return anything else unchanged."""
    scalar = isinstance(number, np.number | torch.Tensor) and number.ndim == 0
    return number.item() if scalar else number
