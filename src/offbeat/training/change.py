"""SelSync's Δ of a worker's own gradient, under any strategy: to look at before choosing δ."""

from offbeat.significance import RelativeChange
from offbeat.strategies.base import Part, Worker


class GradientChange:
    """Puts Δ, as ``SelSync`` would see it, into each record: ``relative_change``.

    Of the gradients before they are averaged and before ``Synchronizer.clip_grad_norm_`` clips
    them, unscaled, over all optimizers; smoothed with a = N/100 over all steps. Nothing is sent.

    *State*: m, which begins anew with every ``attach``: the first Δ is ∞.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._change, self._squared = worker, RelativeChange(), 0.0

    def add(self, part: Part, loss_scale: float) -> None:
        """The gradients of one optimizer are ready; they are ``loss_scale`` times too large."""
        self._squared += self._worker.squared_norm(part.gradients()) / loss_scale**2

    def end(self) -> None:
        """Those of all optimizers were added."""
        squared, self._squared = self._squared, 0.0
        smoothing = min(1.0, self._worker.size / 100)
        self._worker.record["relative_change"] = self._change.update(squared, smoothing)
