import numpy as np
import pytest
import torch

from hpctrain.errors import ConfigError
from hpctrain.h5.fields import Field
from hpctrain.recipes.digits import Digits
from hpctrain.training.task import Batch, DatasetInfo


def info(shape: tuple[int, ...] = (28, 28), label: str = "label") -> DatasetInfo:
    image = Field("image", "dense", np.dtype("u1"), shape, mean=33.0, std=78.0)
    return DatasetInfo({"image": image, label: Field(label, "dense", np.dtype("u1"), ())}, None, 100)


def bars(count: int = 64, seed: int = 0) -> Batch:
    """Pictures with one bright column each; the label is where."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 10, (count,), generator=generator)
    image = torch.randint(0, 30, (count, 28, 28), generator=generator).to(torch.uint8)
    image[torch.arange(count), :, 2 * label + 4] = 255
    return {"image": image, "label": label.to(torch.uint8), "id": torch.arange(count)}


def trained(steps: int, seed: int = 3) -> tuple[Digits, torch.nn.Module, list[float]]:
    task = Digits(width=8, shift_pixels=0)
    task.setup(info())
    torch.manual_seed(seed)
    model, losses = task.model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(1000 * seed + step)
        optimizer.zero_grad()
        loss, weight = task.loss(model, bars(seed=step))
        assert weight == 64
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return task, model, losses


def test_the_loss_falls_and_the_accuracy_rises() -> None:
    task, model, losses = trained(30)
    assert losses[0] > 1.5
    assert losses[-1] < 0.2 * losses[0]
    accuracy, weight = task.evaluate(model, bars(200, seed=99))["accuracy"]
    assert accuracy > 0.9
    assert weight == 200


def test_the_same_seeds_give_the_same_weights() -> None:
    first, again, other = (trained(3, seed)[1].state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_accuracy_counts_the_largest_logits() -> None:
    class Constant(torch.nn.Module):
        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            return torch.eye(10)[3].expand(len(picture), 10)

    batch = bars(10)
    batch["label"] = torch.tensor([3, 3, 3, 1, 2, 4, 5, 6, 7, 8], dtype=torch.uint8)
    assert Digits().evaluate(Constant(), batch) == {"accuracy": (0.3, 10.0)}


def test_pictures_are_normalised_with_the_packed_numbers() -> None:
    seen = []

    class Spy(torch.nn.Linear):
        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            seen.append(picture)
            return super().forward(picture.flatten(1))

    task = Digits(shift_pixels=2)
    task.setup(info())
    batch = bars(4)
    batch["image"] = torch.full((4, 28, 28), 33, dtype=torch.uint8)
    task.evaluate(Spy(784, 10), batch)
    assert torch.equal(seen[0], torch.zeros(4, 1, 28, 28))
    task.loss(Spy(784, 10), batch)
    assert sorted(seen[1].unique().tolist()) in ([0.0], pytest.approx([-33 / 78, 0.0]))


@pytest.mark.parametrize("dataset", [info(shape=(32, 32)), info(label="target"), DatasetInfo({}, None, 1)])
def test_another_set_is_refused(dataset: DatasetInfo) -> None:
    with pytest.raises(ConfigError, match=r"digits needs image \(28, 28\) and a label.*hpctrain data digits"):
        Digits().setup(dataset)


@pytest.mark.parametrize("options", [{"width": 0}, {"width": 12}, {"shift_pixels": -1}, {"shift_pixels": 28}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"task.options.{next(iter(options))} = "):
        Digits(**options)
