"""A data loader that tells a ``LeasedSampler`` which batches the training loop has received."""

from collections.abc import Iterable, Iterator
from typing import Any

from offbeat.data.leasing.access import has_finishing, is_elastic, share_model
from offbeat.data.leasing.departure import leaving_on_sigterm
from offbeat.data.leasing.sampler import LeasedSampler


class LeasedIterable(Iterable[Any]):
    """Batches of leased data.

    Attributes:
        sampler: The ``LeasedSampler`` that leases the data.
    """

    sampler: LeasedSampler

    def leftovers(self) -> Iterator[Any]:
        """Iterate over what workers that were lost late have left of the epochs so far.

        Use it in elastic training after the last epoch, if no sample may be missing. All workers
        call it, and then ``finish``, without another collective between them::

            for batch in loader.leftovers():
                ...
            sync.finish()

        It waits for all workers and replaces their models by a common one. At its end all models
        contain all samples of these epochs, so a worker may be lost afterwards, unless a worker has
        called ``finish`` without it. If training is not elastic, there is nothing to iterate over
        and no wait.
        """
        sync, known = self.sampler.sync, set[tuple[int, int, str]]()
        if not is_elastic(sync):
            return
        while True:
            with sync.consensus():
                pass  # all workers have taken all their steps
            share_model(sync)
            if self.sampler.reclaim():
                yield from self
                continue
            # The model contains what workers held before it was shared, but not what they hold
            # since then. After ``finish`` a worker takes part in no further round.
            outstanding = self.sampler.outstanding()
            if outstanding <= known or has_finishing(sync):
                return
            known = outstanding


class LeasedLoader(LeasedIterable):
    """Wraps a DataLoader whose batches come from a ``LeasedSampler``.

    The loader may have worker processes (``num_workers``): they read batches ahead of use, and the
    sampler leases in the main process. A worker that is lost has then not used the batches that
    were only read ahead. At the end of training a fast worker may end earlier than a slow one, by
    up to the number of batches that the slow one has read ahead.

    In elastic training, a worker that receives SIGTERM in a loop over this loader completes its
    step, leaves the training without the loss of a step, gives its leases back, and ends, unless
    the script handles SIGTERM.

    Args:
        loader: A DataLoader with ``batch_sampler=sampler``, or with ``batch_size=None`` and
            ``sampler=sampler``.

    Attributes:
        loader: The wrapped loader.
        sampler: Its ``LeasedSampler``.

    Raises:
        TypeError: The loader has no ``LeasedSampler``.
        ValueError: The loader returns other batches than the sampler, or in another order.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        candidates = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
        found = next((each for each in candidates if isinstance(each, LeasedSampler)), None)
        if found is None:
            raise TypeError(
                "loader must be a DataLoader with batch_sampler=LeasedSampler(…), got "
                f"{type(loader).__name__} with {candidates[0]!r}"
            )
        if found is candidates[1] and getattr(loader, "batch_size", None) is not None:
            raise ValueError(
                "the loader joins batches of the LeasedSampler to larger ones: pass it as "
                "batch_sampler=, or as sampler= with batch_size=None"
            )
        if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
            raise ValueError("in_order=False changes the order of the batches: leave it out")
        self.loader, self.sampler = loader, found
        found.count_by_loader()

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this worker if all are equally fast."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches that this worker takes in this epoch."""
        with leaving_on_sigterm(self.sampler) as leave_if_received:
            for batch in self.loader:
                leave_if_received()
                self.sampler.hand_out()
                yield batch
            leave_if_received()
