"""The tensors of one worker's model: parameters, buffers, buckets and snapshots."""

import torch
from torch import nn

from offbeat.averaging.replica import Replica


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Linear(2, 3)
        self.a = nn.Linear(3, 3).to(torch.bfloat16)
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.z.weight
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("plain", torch.ones(2))
        self.register_buffer("mask", torch.ones(4), persistent=False)


def replica_of(model: nn.Module) -> Replica:
    return Replica(model, [p for p in model.parameters() if p.requires_grad])


def test_parameters_are_a_fixed_list_sorted_by_name() -> None:
    """The averaged list is ordered by name, without frozen ones, tied ones once."""
    model = Model()
    names = [name for name, _ in replica_of(model).parameters]
    want = ["a.bias", "a.weight", "norm.bias", "norm.weight", "tied.bias", "z.bias", "z.weight"]
    assert names == want
    model.z.weight.grad = torch.ones(3, 2)  # what has a gradient does not matter
    assert [name for name, _ in replica_of(model).parameters] == want


def test_buffers_are_sorted_by_dtype() -> None:
    """Floats and complex numbers are averaged, counters take a maximum, others do neither."""
    model = Model()
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("packed", torch.ones(2, dtype=torch.uint8))
    replica = replica_of(model)
    floats, integers = replica.float_buffers(), replica.integer_buffers()
    assert {id(b) for b in floats} == {
        id(model.norm.running_mean),
        id(model.norm.running_var),
        id(model.plain),
        id(model.phase),
    }
    assert [id(b) for b in integers] == [id(model.norm.num_batches_tracked)]
    assert [id(b) for b in replica.other_buffers()] == [id(model.flags), id(model.packed)]
    assert len(replica.averaged()) == 7 + 4
    assert len(replica.everything()) == 7 + 1 + 8


def test_buffers_that_no_checkpoint_contains_do_not_change() -> None:
    """They are constants. A buffer with two names counts as constant if one of them says so."""
    model = Model()
    model.z.register_buffer("table", torch.ones(3), persistent=False)
    model.a.register_buffer("again", model.z.table)
    replica = replica_of(model)
    synchronized = {id(b) for b in (*replica.float_buffers(), *replica.other_buffers())}
    assert id(model.plain) in synchronized
    assert not synchronized & {id(model.mask), id(model.z.table)}
    with torch.no_grad():
        saved = replica.snapshot()
        model.mask.fill_(7)
        replica.restore(saved)
    assert model.mask.tolist() == [7] * 4


def test_describe_contains_shape_dtype_and_role_of_every_tensor() -> None:
    """The workers compare one line for each parameter and buffer."""
    lines = replica_of(Model()).describe()
    assert len(lines) == 8 + 6
    assert "parameter 'z.weight': shape (3, 2), torch.float32, averaged" in lines
    assert "parameter 'fixed': shape (2,), torch.float32, frozen" in lines
    assert "parameter 'a.bias': shape (3,), torch.bfloat16, averaged" in lines
    assert "buffer 'flags': shape (2,), torch.bool" in lines


def test_snapshot_and_restore_keep_bits_and_storage() -> None:
    """Everything that a mean may change is restored in place."""
    model = Model()
    replica = replica_of(model)
    tensors = [*model.parameters(), *model.buffers()]
    before = [t.detach().clone() for t in tensors]
    addresses = [t.data_ptr() for t in tensors]
    taken = replica.snapshot()
    assert not {t.data_ptr() for t in taken} & set(addresses)
    with torch.no_grad():
        for tensor in [*replica.averaged(), *replica.integer_buffers()]:
            tensor.add_(5)
        model.flags.logical_not_()
    replica.restore(taken)
    for tensor, value in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)
    assert [t.data_ptr() for t in tensors] == addresses


def test_buckets_are_kept_until_a_buffer_is_rebound() -> None:
    """The staging tensors are the same, unless a buffer was replaced."""
    model = Model()
    replica = replica_of(model)
    first = replica.buckets()
    assert replica.buckets() is first
    held = {id(t) for b in first for t in b.tensors}
    assert held == {id(t) for t in replica.averaged()}
    assert [id(t) for b in replica.buckets("buffers") for t in b.tensors] == [
        id(t) for t in replica.float_buffers()
    ]
    assert replica.buckets() is first
    model.norm.running_mean = torch.full((3,), 4.0)
    again = replica.buckets()
    assert id(model.norm.running_mean) in {id(t) for b in again for t in b.tensors}
