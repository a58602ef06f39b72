"""A snapshot goes out and comes back bit for bit, through JSON and safetensors."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpctrain.checkpoint.snapshot import Cursor, put_snapshot, state_digest, take_snapshot, weights_digest
from hpctrain.errors import ConfigError

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def net() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3))
    model.register_buffer("seen", torch.tensor([1, 2], dtype=torch.int16))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(5, 1, 4, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for seed in range(3):
        step(model, optimizer, seed)
    snapshot = take_snapshot(model, optimizer, Cursor(3, 1, 0))
    document = json.loads(json.dumps(snapshot.optimizer))
    other = net()
    other_optimizer = OPTIMIZERS[name](other.parameters())
    put_snapshot(
        type(snapshot)(snapshot.cursor, copy.deepcopy(snapshot.tensors), document), other, other_optimizer
    )
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, other_optimizer, seed)
    assert weights_digest(model) == weights_digest(other)
    cursor = Cursor(6, 2, 0)
    assert state_digest(take_snapshot(model, optimizer, cursor)) == state_digest(
        take_snapshot(other, other_optimizer, cursor)
    )


def test_a_snapshot_does_not_change_when_training_goes_on() -> None:
    """Saving tensors of the CPU by reference stored the values after the next step (pytorch #144657)."""
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step(model, optimizer, 0)
    snapshot = take_snapshot(model, optimizer, Cursor(1))
    before = state_digest(snapshot)
    step(model, optimizer, 1)
    assert state_digest(snapshot) == before
    assert state_digest(take_snapshot(model, optimizer, Cursor(1))) != before


def test_the_digest_sees_everything() -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step(model, optimizer, 0)
    digests = {state_digest(take_snapshot(model, optimizer, Cursor(1)))}
    weights = {weights_digest(model)}
    digests.add(state_digest(take_snapshot(model, optimizer, Cursor(2))))
    with torch.no_grad():
        optimizer.state[model[0].weight]["exp_avg"][0, 0, 0, 0] += 1e-9
        digests.add(state_digest(take_snapshot(model, optimizer, Cursor(1))))
        model.seen[1] += 1
        digests.add(state_digest(take_snapshot(model, optimizer, Cursor(1))))
        weights.add(weights_digest(model))
        model[3].bias[0] = torch.nextafter(model[3].bias[0], torch.tensor(9.0))
        weights.add(weights_digest(model))
    optimizer.param_groups[0]["lr"] *= 2
    digests.add(state_digest(take_snapshot(model, optimizer, Cursor(1))))
    assert len(digests) == 5
    assert len(weights) == 3


def test_a_model_of_another_form_is_refused() -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    snapshot = take_snapshot(model, optimizer, Cursor(7))
    other = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"step 7 does not fit.*another --dir"):
        put_snapshot(snapshot, other, torch.optim.AdamW(other.parameters()))


def test_state_that_would_need_pickle_is_refused() -> None:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    optimizer.param_groups[0]["callback"] = print
    with pytest.raises(ConfigError, match="callback"):
        take_snapshot(model, optimizer, Cursor())


@given(st.integers(1, 50), st.integers(1, 200))
def test_the_cursor_counts_epochs(steps_per_epoch: int, steps: int) -> None:
    cursor = Cursor()
    for _ in range(steps):
        cursor = cursor.advanced(steps_per_epoch, "d", skipped=False)
    assert cursor.step == steps
    assert (cursor.epoch, cursor.step_in_epoch) == divmod(steps, steps_per_epoch)
    assert cursor.advanced(steps_per_epoch, "d", skipped=True).skipped_steps == 1
