"""``offbeat.save`` and ``offbeat.load``: the same run after any crash, or an error on all."""

import enum
import logging
import os
import random
import re
import shutil
import signal
import stat
import threading
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offbeat
import workers
import worlds
from loops import all_numbers, attach, error_of, sgd, start
from offbeat.checkpoint.files import Files, read
from offbeat.checkpoint.worker_state import FORMAT, WorkerState
from offbeat.data import LeasedSampler
from offbeat_lab.baselines import STRATEGIES
from problems import loss_of, make_batch, make_model, make_wide, train_step
from worlds import run

STEPS = 9
ROWS = [
    ("local:period=3", "int8"),
    ("async:staleness=4,outer_momentum=0.5", "float32"),
    ("streaming:parts=3,schedule=cyclic,staleness=4", "int8"),
    ("bsp", "int8"),
    ("selsync:target_lssr=0.5", "float32"),
]
"""Every strategy is saved and resumed in tests/strategies/test_conformance.py."""


class Training:
    """A worker with everything that has a state: dropout, a schedule, a scaler, random numbers."""

    def __init__(self, rank: int, text: str = "local:period=3", wire: str = "float32") -> None:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(rank)
        self.rank = rank
        self.model = nn.Sequential(make_wide(rank, norm=True), nn.Dropout(0.2), nn.Linear(1, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=30)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        strategy = offbeat.parse_strategy(text, STRATEGIES)
        self.sync = offbeat.attach(
            self.model,
            self.optimizer,
            strategy,
            wire=wire,
            scaler=self.scaler,
            timeout_seconds=20,
        )
        self.mine = 0.0  # the user's own
        self.trace: list[Tensor] = []

    def step(self) -> None:
        self.mine += random.random() + float(np.random.rand())
        self.optimizer.zero_grad()
        batch = make_batch(self.rank, self.sync.step, dtype=torch.float32)
        self.scaler.scale(loss_of(self.model, batch)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.trace.append(torch.cat([all_numbers(self.model), torch.tensor([self.mine])]))

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def save(self, folder: Path, **options: Any) -> Path:
        extra = {"mine": self.mine, "tensor": torch.tensor([self.mine])}
        return offbeat.save(
            folder,
            self.sync,
            scheduler=self.scheduler,
            scaler=self.scaler,
            **{"extra": extra, **options},
        )

    def load(self, folder: Path) -> Any:
        found = offbeat.load(folder, self.sync, scheduler=self.scheduler, scaler=self.scaler)
        if found is not None:
            self.mine = found.extra["mine"]
            assert found.extra["tensor"] == torch.tensor([self.mine])
            assert found.step == self.sync.step
        return found

    def end(self) -> Tensor:
        totals = self.sync.stats
        self.sync.finish()
        counted = [totals.steps, totals.syncs, totals.payload_bytes]
        last = torch.cat([all_numbers(self.model), torch.tensor([self.mine])])
        counts = torch.zeros_like(last)
        counts[:3] = torch.tensor(counted)
        return torch.stack([*self.trace, last, counts])


# -- the same run --------------------------------------------------------------------------------


def whole(rank: int, size: int, text: str, wire: str) -> Tensor:
    training = Training(rank, text, wire)
    training.steps(STEPS)
    return training.end()


def saving(rank: int, size: int, text: str, wire: str, folder: Path) -> Tensor:
    training = Training(rank, text, wire)
    assert training.load(folder) is None
    for _ in range(STEPS):
        training.step()
        if training.sync.step in (2, 4, 5):
            path = training.save(folder)
            assert path == folder / f"step-{training.sync.step}.rank{rank}.pt"
    return training.end()


def resuming(rank: int, size: int, text: str, wire: str, folder: Path) -> Any:
    training = Training(rank + 7, text, wire)  # another process has other models and seeds
    training.rank = rank
    found = training.load(folder)
    training.steps(STEPS - training.sync.step)
    return found.step, training.end()


@pytest.mark.parametrize(
    ("text", "wire"),
    [
        pytest.param(*row, id="-".join(row), marks=[pytest.mark.nightly] * (i > 3))
        for i, row in enumerate(ROWS)
    ],
)
def test_a_loaded_training_continues_bit_for_bit(text: str, wire: str, tmp_path: Path) -> None:
    """Model, optimizer, schedule, scaler, random states and totals.

    Saving changes nothing if the workers wait for each mean. Otherwise it lands what is in flight.
    """
    plain = run(saving, text, wire, tmp_path, workers=3)
    if not text.startswith(("async", "streaming")):
        for got, want in zip(run(whole, text, wire, workers=3), plain, strict=True):
            assert torch.equal(got, want)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f"step-{step}.rank{rank}.pt" for step in (4, 5) for rank in range(3)]
    resumed = run(resuming, text, wire, tmp_path, workers=3)
    for (step, got), want in zip(resumed, plain, strict=True):
        assert step == 5
        assert torch.equal(got, want[5:])


# -- whatever crashed ----------------------------------------------------------------------------


def two_saves(rank: int, size: int, folders: list[Path], keep: int = 2) -> Tensor:
    """Save at steps 3 and 5. Returns the models after step 3."""
    training = Training(rank)
    for number in (3, 2):
        training.steps(number)
        training.save(folders[rank], keep=keep)
    training.steps(2)
    return torch.stack(training.trace[3:])


def continue_from(rank: int, size: int, folders: list[Path]) -> Any:
    """Load, take a step and save. Returns the loaded step and the models."""
    training = Training(rank)
    found = training.load(folders[rank])
    training.step()
    course = torch.stack(training.trace)
    training.save(folders[rank])
    training.sync.finish()
    return found.step, course


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: min(len(data) - 1, int(len(data) * share))])


def flip(path: Path) -> None:
    """Flip a bit of a parameter, which torch.load does not notice."""
    data = bytearray(path.read_bytes())
    value = torch.load(path, weights_only=True)["model"]["0.0.weight"].numpy().tobytes()
    data[bytes(data).index(value)] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: cut(path, 0),
    "half": lambda path: cut(path, 0.5),
    "a byte short": lambda path: cut(path, 1),
    "a bit": flip,
    "another file": lambda path: torch.save({"weights": torch.ones(3)}, path),
    "text": lambda path: path.write_text("no checkpoint"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("shared", [True, False], ids=["one directory", "one each"])
@pytest.mark.parametrize("name", DAMAGES)
def test_all_continue_from_the_checkpoint_before_if_one_file_is_damaged(
    name: str, shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1's newest file is damaged.

    Rank 0 skips its own, too, a warning is logged, and saving works.
    """
    folders = [tmp_path / ("both" if shared else str(rank)) for rank in range(2)]
    courses = run(two_saves, folders, workers=2)
    DAMAGES[name](folders[1] / "step-5.rank1.pt")
    with caplog.at_level(logging.INFO, "offbeat"):
        results = run(continue_from, folders, workers=2)
    for (step, course), want in zip(results, courses, strict=True):
        assert step == 3
        assert torch.equal(course, want[:1])
    if worlds.world == "simulated":  # processes write to their own logs
        said = caplog.text
        assert "training continues from step 3" in said
        assert "the checkpoint of step 5 is skipped: rank 1: " in said
    for rank, folder in enumerate(folders):
        own = {path.name for path in folder.iterdir() if f"rank{rank}" in path.name}
        aside = {f"step-5.rank{rank}.pt.damaged"} if (rank == 0 or name != "gone") else set()
        assert own == {f"step-{step}.rank{rank}.pt" for step in (3, 4)} | aside


def test_files_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    """Files with the same names from two runs were not saved together."""
    (one, other), folders = (tmp_path / "one", tmp_path / "other"), [tmp_path / "one"] * 2
    run(two_saves, folders, workers=2)
    run(two_saves, [other] * 2, workers=2)
    shutil.copy(other / "step-5.rank1.pt", one / "step-5.rank1.pt")
    assert [step for step, _ in run(continue_from, folders, workers=2)] == [3, 3]


def nothing_whole(rank: int, size: int, folder: Path) -> Any:
    training = Training(rank)
    before = all_numbers(training.model)
    error = error_of(lambda: training.load(folder))
    assert torch.equal(all_numbers(training.model), before)
    training.steps(2)
    return error, training.end()


def test_without_a_complete_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    """A silent start from scratch would lose the run."""
    run(two_saves, [tmp_path] * 2, 1, workers=2)
    cut(tmp_path / "step-5.rank0.pt", 0.7)
    results = run(nothing_whole, tmp_path, workers=2)
    for (kinds, message), _ in results:
        assert kinds[0] == "CheckpointError"
        assert message.startswith(f"no checkpoint in {tmp_path} is whole on all workers: step 5: ")
    (tmp_path / "step-5.rank0.pt").unlink()
    for (_, message), _ in run(nothing_whole, tmp_path, workers=2):
        assert "is whole on all workers: step 5: rank 0: " in message
        assert "No such file or directory" in message


def killed(rank: int, size: int, folder: Path, moment: str) -> str:
    """Rank 1 is killed while it writes a checkpoint, the first or the second one."""
    model, optimizer, sync = start(rank, "local:period=2")
    if moment != "in the first file":
        offbeat.save(folder, sync)
        train_step(model, optimizer, make_batch(rank, 0))
    if rank == 1:

        def die(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def write(contents: Any, file: Any) -> None:  # half-way through the bytes
            until(lambda: len(list(folder.glob(".*.partial"))) == size)
            file.write(b"PK" * 99)
            file.flush()
            die()

        def rename(*args: Any) -> None:  # rank 0's has its name, and is the only one left
            until(lambda: [path.name for path in folder.glob("*.rank0.pt")] == ["step-1.rank0.pt"])
            die()

        if moment.startswith("in"):
            torch.save = write
        elif moment == "before its name":
            Path.replace = rename  # type: ignore[method-assign,assignment]
        else:
            Path.unlink = die  # type: ignore[method-assign,assignment]
    kinds, _ = error_of(lambda: offbeat.save(folder, sync, keep=1))
    return kinds[0] if kinds else ""


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def found_after(rank: int, size: int, folder: Path) -> int | None:
    _, _, sync = start(rank, "local:period=2")
    found = offbeat.load(folder, sync)
    offbeat.save(folder, sync, keep=1)
    return None if found is None else found.step


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        *(("in the first file", None), ("in the second file", 0)),
        *(("before its name", 1), ("while others go", 1)),
    ],
)
def test_a_killed_writer_leaves_this_checkpoint_or_the_one_before(
    moment: str, step: int | None, tmp_path: Path
) -> None:
    """With keep=1 the old one is deleted only when the new one is on the disks of all workers.

    If the first one is not complete, a restart starts from scratch: no checkpoint was lost.
    """
    (error, _) = workers.run(killed, tmp_path, moment, workers=2, may_die=(1,))
    assert (error == "CommunicationError") == (step != 1)
    assert run(found_after, tmp_path, workers=2) == [step, step]
    names = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".damaged")}
    own = "step-0" if step is None else f"step-{step}-1"  # the same step once more
    assert names == {f"{own}.rank{rank}.pt" for rank in range(2)}


# -- what is refused -----------------------------------------------------------------------------


def refused(rank: int, size: int, folder: Path) -> Any:
    """Save and load with wrong arguments; training continues in between."""
    training, seen = Training(rank), {}
    training.steps(2)
    training.save(folder / "good")
    extra: Any = [all_numbers] if rank else None
    seen["extra"] = error_of(lambda: training.save(folder / "good", extra=extra))
    (folder / "file").write_text("in the way")
    elsewhere = folder / ("file" if rank else "good")
    seen["disk"] = error_of(lambda: training.save(elsewhere))
    seen["keep"] = error_of(lambda: training.save(folder, keep=0))
    sync: Any = None
    seen["sync"] = error_of(lambda: offbeat.save(folder, sync))
    good, sync = folder / "good", training.sync
    seen["file"] = error_of(lambda: training.load(good / f"step-2.rank{rank}.pt"))
    one = good / "step-2.rank1.pt" if rank else good
    seen["file of one"] = error_of(lambda: training.load(one))
    seen["scheduler"] = error_of(lambda: offbeat.load(good, sync, scaler=training.scaler))
    other: Any = torch.optim.lr_scheduler.ConstantLR(sgd(make_model()))
    seen["another scheduler"] = error_of(
        lambda: offbeat.load(good, sync, scheduler=other, scaler=training.scaler)
    )
    seen["scaler"] = error_of(lambda: offbeat.load(good, sync, scheduler=training.scheduler))
    with sync.consensus():
        seen["consensus"] = error_of(lambda: training.load(good))
    for _ in range(2):
        training.step()
    result = torch.stack(training.trace)
    sync.finish()
    seen["finish"] = error_of(lambda: training.save(good))
    seen["load after finish"] = error_of(lambda: training.load(good))

    late = Training(rank)
    late.step()
    seen["later"] = error_of(lambda: late.save(good))
    late.sync.detach()
    bsp = Training(rank, "bsp")
    seen["strategy"] = error_of(lambda: bsp.load(good))
    bsp.sync.detach()
    model, text = training.model, offbeat.LocalSGD(period=3)
    wide = [*model[0].parameters()], [*model[2].parameters()]
    adam = torch.optim.AdamW([{"params": each} for each in wide])
    for name, module, optimizer in [
        ("optimizer", model, sgd(model)),
        ("groups", model, adam),
        ("model", small := make_model(), torch.optim.AdamW(small.parameters())),
    ]:
        sync = offbeat.attach(module, optimizer, text)
        seen[name] = error_of(lambda sync=sync: offbeat.load(good, sync))
        sync.detach()
    return seen, result, sorted(path.name for path in good.iterdir())


def test_wrong_arguments_are_refused_by_all_and_change_nothing(tmp_path: Path) -> None:
    expected = {
        "extra": (
            r"rank 1 cannot take part in offbeat.save\(\), so no worker does: .*rank1.pt could not"
            r" be written: a checkpoint can only have numbers, .*: Unsupported global: GLOBAL loops"
        ),
        "disk": "rank 1 cannot take part in offbeat.save.*file/step-2-1.rank1.pt could not be writ",
        "keep": "keep must be at least 1, got 0",
        "sync": "sync must be what offbeat.attach.. returned, got None",
        "file": "good/step-2.rank.*.pt is a file: name the directory of the checkpoints",
        "file of one": "rank 1 cannot take part in offbeat.load.*rank1.pt is a file: name the dir",
        "scheduler": "step-2.rank.*.pt: .* with scheduler 0: OneCycleLR, here is nothing more: ",
        "another scheduler": "was saved with scheduler 0: OneCycleLR, here is scheduler 0: ",
        "scaler": "the state was saved with an enabled scaler, here is no scaler: build, attach",
        "optimizer": r"with optimizer 0: AdamW with groups of \[\d+\] .*, here is optimizer 0: SGD",
        "groups": r"AdamW with groups of \[\d+\] parameters, here is .* of \[\d+, 2\] parameters",
        "model": "of .* parameters, here is optimizer 0: AdamW with groups of .6. parameters",
        "consensus": r"offbeat.load\(\) inside consensus\(\)",
        "finish": r"offbeat.save\(\) after .* detach\(\): call it before, or inside consensus\(\)",
        "load after finish": r"offbeat.load\(\) after finish\(\) or detach\(\)",
        "later": "good holds a checkpoint of step 2, this is step 1: continue from it with offbe",
        "strategy": r"was saved with strategy LocalSGD\(period=3\), here is strategy BSP\(\): ",
    }
    plain = run(two_saves, [tmp_path / "other"] * 2, workers=2)
    for rank, (seen, course, names) in enumerate(run(refused, tmp_path, workers=2)):
        assert seen.keys() == expected.keys()
        for name, pattern in expected.items():
            kinds, message = seen[name]
            assert re.search(pattern, message), (name, message)
            other = {"keep": "ValueError", "sync": "TypeError"}
            at = "AttachError" if "finish" in name or name == "consensus" else "CheckpointError"
            assert kinds[0] == other.get(name, at), (name, kinds)
        assert names == ["step-2.rank0.pt", "step-2.rank1.pt"]
        assert torch.equal(course[3:4], plain[rank][:1])


def other_steps(rank: int, size: int, folder: Path) -> str:
    training = Training(rank, "async:staleness=8")
    training.steps(1 + rank)
    message = error_of(lambda: training.save(folder))[1]
    training.sync.finish()
    return message


def test_all_save_at_the_same_step(tmp_path: Path) -> None:
    want = (
        "offbeat.save() on rank 1 has the state of a worker at step 2, on rank 0 that of a worker "
        "at step 1: all workers save and load at the same step, or all in a consensus"
    )
    assert run(other_steps, tmp_path, workers=2) == [want] * 2
    assert not list(tmp_path.iterdir())


# -- the consensus -------------------------------------------------------------------------------


def save_consensus(rank: int, size: int, folder: Path) -> Any:
    training = Training(rank, "async:staleness=4")
    training.steps(4 - rank)  # one has less data
    with training.sync.consensus():
        training.save(folder)
        seen = training.model.state_dict()
        kept = {name: value.clone() for name, value in seen.items()}
    training.sync.finish()
    return kept


def from_consensus(rank: int, size: int, text: str, folder: Path, model: Any) -> Any:
    """Start from the file, or from its model loaded before ``attach`` and rank 0's optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(make_wide(rank, norm=True), nn.Dropout(0.0), nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=30)
    scaler = torch.amp.GradScaler("cpu")  # enabled, as in the saved run
    if model is not None:
        net.load_state_dict(model)
    sync = attach(net, optimizer, text, wire="int8")
    step = 0
    if model is None:
        found = offbeat.load(folder, sync, scheduler=scheduler, scaler=scaler)
        assert found is not None
        step = found.step
    else:
        own = torch.load(folder / f"step-4.rank{rank if rank < 3 else 0}.pt", weights_only=True)
        optimizer.load_state_dict(own["optimizer"][0])
    for i in range(3):
        optimizer.zero_grad()
        loss_of(net, make_batch(rank, i, dtype=torch.float32)).backward()
        optimizer.step()
    sync.finish()
    return step, all_numbers(net)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("text", ["diloco:period=2", "streaming:schedule=cyclic"])
def test_a_consensus_is_loaded_by_any_number_of_workers(
    text: str, size: int, tmp_path: Path
) -> None:
    """The result equals attaching to its model. New workers take rank 0's optimizer."""
    model, *_ = run(save_consensus, tmp_path, workers=3)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-4.rank{i}.pt" for i in range(3)}
    want = run(from_consensus, text, tmp_path, model, workers=size)
    got = run(from_consensus, text, tmp_path, None, workers=size)
    for (step, end), (_, expected) in zip(got, want, strict=True):
        assert step == 4
        assert torch.equal(end, expected)


def continue_consensus(rank: int, size: int, folder: Path) -> Any:
    """Load the consensus, take a step and save. Returns the number of steps."""
    training = Training(rank)
    training.load(folder)
    training.step()
    training.save(folder)
    training.sync.finish()
    return training.sync.step


def test_workers_with_unequal_steps_continue_to_count_from_the_largest(tmp_path: Path) -> None:
    """Otherwise they could never save at the same step again."""
    run(save_consensus, tmp_path, workers=3)  # after 4, 3 and 2 steps
    assert run(continue_consensus, tmp_path, workers=3) == [5] * 3
    assert (tmp_path / "step-5.rank2.pt").exists()


def random_after_loading(rank: int, size: int, folder: Path) -> float:
    training = Training(rank)
    training.load(folder)
    training.sync.detach()
    return torch.rand(()).item()


def test_a_new_worker_keeps_its_own_random_numbers(tmp_path: Path) -> None:
    """Rank 0's would give it the same dropout and the same shuffle as rank 0."""
    run(save_consensus, tmp_path, workers=1)
    first, second = run(random_after_loading, tmp_path, workers=2)
    assert first != second


def forgotten(rank: int, size: int, folder: Path) -> str:
    """Save without loading what the directory holds."""
    training = Training(rank)
    training.step()
    message = error_of(lambda: training.save(folder))[1]
    training.sync.finish()
    return message


def test_more_workers_do_not_delete_the_checkpoints_of_fewer(tmp_path: Path) -> None:
    run(two_saves, [tmp_path] * 2, workers=2)
    held = {path.name for path in tmp_path.iterdir()}
    for message in run(forgotten, tmp_path, workers=4):
        assert "holds a checkpoint of step 5, this is step 1" in message
    assert {path.name for path in tmp_path.iterdir()} == held


# -- what can be saved, and where ----------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


class Stubborn:
    """An object that fails when it is pickled."""

    def __reduce__(self) -> str:
        raise KeyError("no pickle")


READABLE = [
    *(None, True, 3, 0.5, 2j, "text", b"bytes", bytearray(b"more"), torch.float16),
    *([1, (2, 3)], {1, 2}, {"a": {"b": 1}}, OrderedDict(a=1), Counter("aab"), torch.Size([2])),
]
NUMPY = [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("text")]
REFUSED = [
    (frozenset({1}), "frozenset"),
    (defaultdict(int), "collections.defaultdict"),
    (Pair(1, 2), "Pair"),
    (Color.RED, "Color"),
    (np.zeros(2), "numpy._core"),
    ({Path("a")}, "PosixPath"),
    (lambda: 0, "lambda"),
    (threading.Lock(), "_thread.lock"),
]


def test_a_checkpoint_accepts_only_what_can_be_read_again(tmp_path: Path) -> None:
    files = Files(tmp_path, 0)
    files.write((1, 0), {"format": FORMAT, "extra": READABLE, "numpy": NUMPY})
    files.rename((1, 0))
    contents = read(files.path((1, 0)))
    assert contents["extra"] == READABLE
    assert [type(value) for value in contents["extra"]] == [type(value) for value in READABLE]
    assert contents["numpy"] == NUMPY
    assert {type(value) for value in contents["numpy"]} == {float, int, bool, str}
    for value, name in REFUSED:
        with pytest.raises(offbeat.CheckpointError, match=f"only have numbers, .* them: .*{name}"):
            files.write((2, 0), {"extra": [value]})
    with pytest.raises(offbeat.CheckpointError, match=r"could not be written: .*no pickle"):
        files.write((2, 0), {"extra": Stubborn()})
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.rank0.pt"]


def test_a_file_without_checksums_is_refused(tmp_path: Path) -> None:
    """``load`` could not read it. Another library may have changed this option of torch."""
    torch.serialization.set_crc32_options(False)
    try:
        with pytest.raises(offbeat.CheckpointError, match="set_crc32_options"):
            Files(tmp_path, 0).write((1, 0), {"format": FORMAT})
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_damage_anywhere_in_a_file_is_found_or_changes_no_value(
    change: str, tmp_path: Path
) -> None:
    """Each byte in turn. Some bytes of a zip archive are padding."""
    files, values = Files(tmp_path, 0), {"format": FORMAT, "weights": [0.5, 1.5], "name": "a"}
    files.write((1, 0), {**values, "weights": torch.tensor(values["weights"])})
    files.rename((1, 0))
    path = files.path((1, 0))
    data, found = path.read_bytes(), 0
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged if change == "flip" else data[:place])
        try:
            read_back = read(path)
        except offbeat.CheckpointError:
            found += 1
        else:
            read_back["weights"] = read_back["weights"].tolist()
            assert read_back == values, place
    assert found == len(data) if change == "cut" else found > len(data) / 4


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        [3],
    ),
}


def scheduled(rank: int, size: int, schedule: str, folder: Path, resumes: bool) -> Any:
    model = make_model(rank + resumes)
    halves = [[*model[0].parameters()], [*model[2].parameters(), *model[3].parameters()]]
    optimizers = [torch.optim.SGD(halves[0], lr=0.1), torch.optim.Adafactor(halves[1])]
    schedules = [SCHEDULES[schedule](one) for one in optimizers]
    sync = attach(model, optimizers, "local:period=2")
    if resumes:
        assert offbeat.load(folder, sync, scheduler=schedules)
    trace = []
    while sync.step < 7:
        loss_of(model, make_batch(rank, sync.step)).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        for one in schedules:
            one.step()
        if sync.step == 4 and not resumes:
            offbeat.save(folder, sync, scheduler=schedules)
        trace.append(
            torch.cat(
                [all_numbers(model), torch.tensor([g["lr"] for g in optimizers[0].param_groups])]
            )
        )
    sync.finish()
    return torch.stack(trace)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_and_optimizers_are_saved(schedule: str, tmp_path: Path) -> None:
    """Several kinds, and several objects. torch.load reads their states without pickles."""
    plain = run(scheduled, schedule, tmp_path, False, workers=2)
    resumed = run(scheduled, schedule, tmp_path, True, workers=2)
    for got, want in zip(resumed, plain, strict=True):
        assert torch.equal(got, want[4:])


def test_a_file_is_on_the_disk_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is flushed afterwards: a power failure leaves no empty file of that name."""
    order, path = [], tmp_path / "step-1.rank0.pt"
    sync, replace = os.fsync, Path.replace

    def flushed(handle: int) -> None:
        order.append((stat.S_ISDIR(os.fstat(handle).st_mode), path.exists()))
        sync(handle)

    def named(partial: Path, target: Path) -> Path:
        order.append(("named", partial.parent == target.parent))
        return replace(partial, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", named)
    files = Files(tmp_path, 0)
    files.write((1, 0), {"format": FORMAT, "a": torch.ones(3)})
    files.rename((1, 0))
    assert order == [(False, False), ("named", True), (True, True)]
    assert torch.equal(read(path)["a"], torch.ones(3))


# -- unequal numbers of steps ----------------------------------------------------------------------


def save_late(rank: int, size: int, text: str, folder: Path) -> Any:
    """Rank 0 takes more steps than rank 1, and then saves."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.attach(model, optimizer, offbeat.parse_strategy(text, STRATEGIES))
    sampler = offbeat.data.LeasedSampler(range(40), 2, sync=sync)
    found = []
    for _ in range(8 - 4 * rank):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    if rank == 0:
        with sync.consensus():
            found = [error_of(lambda: offbeat.save(folder, sync)), error_of(sampler.state_dict)]
    sync.finish()
    return found, model.weight.tolist()


@pytest.mark.parametrize("text", ["bsp", "local:period=3", "streaming"])
def test_saving_is_refused_after_another_worker_has_ended(text: str, tmp_path: Path) -> None:
    """The worker that has ended takes part in the consensus, and not in saving."""
    (found, model), (_, other) = run(save_late, text, tmp_path, workers=2)
    assert not list(tmp_path.iterdir())
    assert model == other
    for kinds, error in found:
        assert "CheckpointError" in kinds, error
        assert "another worker has called finish()" in error


# -- size ------------------------------------------------------------------------------------------


def saved_bytes(rank: int, size: int, folder: Path) -> tuple[int, int]:
    """Save a model of 1 MB in the default training. Returns the bytes of the model and the file."""
    model = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    sync = offbeat.attach(model, optimizer)
    for _ in range(3):
        train_step(model, optimizer, (torch.randn(2, 512), torch.randn(2, 512)))
    path = offbeat.save(folder, sync)
    sync.finish()
    return sum(p.nbytes for p in model.parameters()), path.stat().st_size


def test_a_file_has_four_times_the_bytes_of_the_model(tmp_path: Path) -> None:
    """The local model, its momentum, the global model and its velocity; the rest is 20 KB."""
    for model, file in run(saved_bytes, tmp_path, workers=2):
        assert 4 * model < file < 4 * model + 20_000


def interrupted(rank: int, size: int, folder: Path, place: str) -> tuple[str, str]:
    """Press Ctrl-C on rank 0 between two collectives of a call, catch it, and train on."""
    model = make_model(rank)
    optimizer = sgd(model)
    sync = attach(model, optimizer, "local:period=2")
    sampler = LeasedSampler(range(8), 2, sync=sync)
    calls = {
        "write": lambda: offbeat.save(folder, sync),
        "check": lambda: offbeat.load(folder, sync),
        "_note_done": sampler.state_dict,
    }
    offbeat.save(folder, sync)

    def press(*args: Any) -> None:
        raise KeyboardInterrupt

    owner: Any = {"write": Files, "check": WorkerState, "_note_done": LeasedSampler}[place]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(owner, place, press)
            with pytest.raises(KeyboardInterrupt):
                calls[place]()
            outcome = ""
        else:
            outcome = error_of(calls[place])[0][0]
    advice = error_of(lambda: train_step(model, optimizer, make_batch(rank, 0)))[1]
    sync.detach()
    return outcome, advice


@pytest.mark.parametrize("place", ["write", "check", "_note_done"])
def test_an_interrupted_call_cannot_be_followed_by_another_collective(
    place: str, tmp_path: Path
) -> None:
    """It would meet a different one of the other worker, which aborts the process under gloo."""
    (_, advice), (outcome, _) = workers.run(interrupted, tmp_path, place, workers=2)
    assert "interrupted by KeyboardInterrupt" in advice
    assert outcome == "CommunicationError"
