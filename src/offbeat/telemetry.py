"""Telemetry: the totals of a worker (``Stats``), and the records of its steps.

A *record* is a dictionary of values about one step. ``Records`` builds it and passes it to
*sinks*, which write it to a file, TensorBoard or Weights & Biases.
"""

import contextlib
import json
import logging
import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

Record = dict[str, Any]
"""Values about one step, by name."""

logger = logging.getLogger("offbeat")


@dataclass
class Stats:
    """Totals of one worker since ``attach``.

    Attributes:
        steps: Number of iterations. One iteration is one step of every optimizer.
        syncs: Number of iterations in which a mean of models or gradients took effect.
        payload_bytes: Bytes of the tensors that this worker passed to collectives or sent to a
            parameter server, after quantization. The bytes of ``attach`` and ``consensus`` are not
            counted.
        wait_seconds: Seconds for which this worker was blocked in communication, without
            ``consensus`` and checkpoints.
        compute_seconds: All other seconds up to the last step, without ``consensus`` and
            checkpoints.
        details: Further totals by name, which depend on the strategy.
    """

    steps: int = 0
    syncs: int = 0
    payload_bytes: int = 0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def local_steps(self) -> int:
        """Number of iterations without a synchronization."""
        return self.steps - self.syncs

    @property
    def flags(self) -> int:
        """Number of steps in which this worker requested a synchronization (SelSync only)."""
        return int(self.details.get("flags", 0))

    @property
    def lssr(self) -> float:
        """Local-to-synchronous step ratio: local steps / all steps; 0 before the first step."""
        return self.local_steps / self.steps if self.steps else 0.0

    @property
    def idle(self) -> float:
        """Share of the time in which this worker waited: wait / (wait + compute), in [0, 1]."""
        total = self.wait_seconds + self.compute_seconds
        return self.wait_seconds / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all totals by name, including the properties."""
        names = ("flags", "local_steps", "lssr", "idle")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


class Sink(Protocol):
    """A destination of records, such as a file."""

    def write(self, record: Record) -> None:
        """Write the record of one step."""

    def close(self) -> None:
        """Flush and release all resources."""


def _number(value: Any) -> Any:
    """Return a tensor or a numpy scalar as a Python number, and any other value unchanged."""
    return value.item() if hasattr(value, "item") else value


def require_recordable(name: str, value: object) -> None:
    """Raise TypeError unless a record can contain ``value``.

    A record can contain real numbers, text, None, and lists, tuples and dictionaries of these, with
    text as keys. Tensors and numpy arrays of one element count as numbers. Their values are not
    read here, because reading would wait for a GPU.
    """
    if isinstance(value, list | tuple):
        for each in value:
            require_recordable(name, each)
    elif isinstance(value, dict):
        for key, each in value.items():
            require_recordable(f"{name}[{key!r}]", each)
            if not isinstance(key, str):
                raise TypeError(f"record({name}=…): keys must be text, got {key!r}")
    elif hasattr(value, "item"):
        shape, kind = tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", ""))
        if math.prod(shape) != 1 or "complex" in kind or getattr(value, "is_meta", False):
            raise TypeError(
                f"record({name}=…) takes one real number, got {type(value).__name__} of shape "
                f"{shape}, {kind}: give its mean, or .tolist()"
            )
    elif not (value is None or isinstance(value, str | numbers.Real)):
        raise TypeError(f"record({name}=…) takes a number, got {value!r}")


class JsonLines:
    """Sink that writes one line for each step to a file: the record as a JSON object.

    Infinite numbers are written as the strings "inf" and "-inf", and NaN as null.

    Args:
        path: Path of the file, which is overwritten. ``{rank}`` is replaced by the rank.
        rank: Rank of this worker.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int = 0) -> None:
        self._path = Path(str(path).replace("{rank}", str(rank)))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = self._path.open("w", encoding="utf-8", buffering=1)

    def __str__(self) -> str:
        return str(self._path)

    def write(self, record: Record) -> None:
        """Append one line."""
        self._file.write(json.dumps(_json(record)) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _json(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, dict):
        return {key: _json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value if value is None or isinstance(value, str | int | float) else float(value)


class TensorBoard:
    """Sink that writes a TensorBoard curve for each number in the records.

    Needs ``offbeat[tensorboard]``.

    Args:
        directory: Log directory. Use one per rank, or write on rank 0 only.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "the TensorBoard sink needs tensorboard: pip install 'offbeat[tensorboard]'"
            ) from error
        self._directory = str(directory)
        self._writer = SummaryWriter(self._directory)

    def __str__(self) -> str:
        return self._directory

    def write(self, record: Record) -> None:
        """Add one point to each curve."""
        numbers = _numbers(record)
        step = int(numbers.pop("step"))
        for name, number in numbers.items():
            self._writer.add_scalar(f"offbeat/{name}", number, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """Sink that logs a Weights & Biases curve for each number in the records.

    Needs ``offbeat[wandb]``. The x-axis of the curves is ``offbeat/step``.

    Args:
        run: Run that ``wandb.init()`` returned. None: a new run, which ``close`` finishes.
    """

    def __init__(self, run: Any = None) -> None:
        self._own = run is None
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise ImportError(
                    "the Weights & Biases sink needs wandb: pip install 'offbeat[wandb]'"
                ) from error
            run = wandb.init()
        elif not callable(getattr(run, "define_metric", None)):
            raise TypeError(f"run must be what wandb.init() returned, got {run!r}")
        self._run = run
        run.define_metric("offbeat/step")
        run.define_metric("offbeat/*", step_metric="offbeat/step")

    def __str__(self) -> str:
        return f"wandb run {self._run.name}"

    def write(self, record: Record) -> None:
        """Add one point to each curve."""
        self._run.log({f"offbeat/{name}": number for name, number in _numbers(record).items()})

    def close(self) -> None:
        """Finish the run if this sink started it."""
        if self._own:
            self._run.finish()


def _numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a record. Encodes the decision "sync" as 1, and "local" as 0."""
    values = {name: _number(value) for name, value in record.items()}
    if "decision" in values:
        values["decision"] = values["decision"] == "sync"
    return {k: float(v) for k, v in values.items() if isinstance(v, bool | int | float)}


def open_sinks(log: object, *, rank: int) -> list[Sink]:
    """Return the sinks for the ``log`` argument of ``attach``.

    A path becomes a ``JsonLines`` sink. Each rank writes a separate file: without ``{rank}`` in the
    path, ``log.jsonl`` becomes ``log.rank0.jsonl`` on rank 0.
    """
    if log is None:
        return []
    if isinstance(log, str | os.PathLike):
        path = Path(log)
        if "{rank}" not in str(path):
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        return [JsonLines(path, rank=rank)]
    if isinstance(log, Sequence):
        return [sink for each in log for sink in open_sinks(each, rank=rank)]
    if callable(getattr(log, "write", None)) and callable(getattr(log, "close", None)):
        return [log]  # type: ignore[list-item]
    raise TypeError(
        f"log must be a path, a sink with write(record) and close(), or a list of them; got {log!r}"
    )


class Records:
    """Builds the record of each step and writes it to the sinks.

    A sink that raises ``OSError``, for example because the disk is full, is removed with a warning,
    and training continues. Other exceptions of a sink propagate.

    Attributes:
        sinks: The sinks that receive each record.
    """

    KEYS = (
        *("step", "rank", "decision"),
        *("compute_seconds", "wait_seconds", "payload_bytes"),
    )
    """Names of the values that every record contains."""

    def __init__(self, sinks: Sequence[Sink], *, rank: int) -> None:
        self.sinks, self._rank = list(sinks), rank
        self._extra: Record = {}

    def add(self, values: Record) -> None:
        """Add ``values`` to the next record, or raise and add none of them.

        Raises ValueError if a name is one of ``KEYS``.
        """
        for name, value in values.items():
            if name in self.KEYS:
                raise ValueError(
                    f"record({name}=…): {name!r} is Offbeat's own; take another name (its own are "
                    f"{', '.join(self.KEYS)})"
                )
            require_recordable(name, value)
        if self.sinks:
            self._extra.update(values)

    def write(self, *values: Any, more: Record) -> None:
        """Write a record: ``values`` in the order of ``KEYS``, those of ``add``, and ``more``."""
        record = {**dict(zip(self.KEYS, values, strict=True)), **self._extra, **more}
        self._extra = {}
        for sink in [*self.sinks]:
            try:
                sink.write(record)
            except OSError as error:
                self.sinks.remove(sink)
                with contextlib.suppress(OSError):  # closing writes buffered records and may fail
                    sink.close()
                self._warn(sink, f"is no longer written, training continues: {error}")

    def close(self) -> None:
        """Close all sinks, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            while self.sinks:
                stack.callback(self._close, self.sinks.pop())

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except OSError as error:
            self._warn(sink, f"lacks the last records: {error}")

    def _warn(self, sink: Sink, what: str) -> None:
        logger.warning("rank %d: the log %s %s", self._rank, sink, what)
