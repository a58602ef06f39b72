from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.errors import ConfigError
from hpctrain.h5.fields import Field
from hpctrain.recipes.emoji import Emoji, top_share, word_bucket, words_of
from hpctrain.training.task import Batch, DatasetInfo

NAMES = ["red", "green", "blue", "white", "black", "yellow", "pink", "cyan"]


def info(num_samples: int = 8, shape: tuple[int, ...] = (32, 32, 3), text: str = "ragged") -> DatasetInfo:
    image = Field("image", "dense", np.dtype("u1"), shape, mean=(200.0, 190.0, 180.0), std=(60.0, 70.0, 80.0))
    words = Field("text", text, np.dtype("u1"), ())  # type: ignore[arg-type]
    return DatasetInfo({"image": image, "text": words}, None, num_samples)


def texts(lines: list[str]) -> dict[str, torch.Tensor]:
    raw = [line.encode() for line in lines]
    offsets = torch.tensor([0, *np.cumsum([len(line) for line in raw]).tolist()])
    return {"values": torch.tensor(list(b"".join(raw)), dtype=torch.uint8), "offsets": offsets}


def squares(seen: list[int] | None = None) -> Batch:
    """Eight pictures: a black square at one of eight places, and a word for each place."""
    image = torch.full((8, 32, 32, 3), 255, dtype=torch.uint8)
    for row in range(8):
        top, left = 16 * (row // 4), 8 * (row % 4)
        image[row, top : top + 16, left : left + 8] = 0
    return {
        "image": image,
        "text": texts([f"{name} square" for name in NAMES]),
        "seen": torch.tensor(seen or [1] * 8),
        "id": torch.arange(8),
    }


def small_task(**options: Any) -> Emoji:
    task = Emoji(**({"width": 8, "dim": 16, "buckets": 512, "word_width": 16} | options))
    task.setup(info())
    return task


def trained(steps: int, seed: int = 3) -> tuple[Emoji, torch.nn.Module, list[float]]:
    task = small_task()
    torch.manual_seed(seed)
    model, losses = task.model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(1000 * seed + step)
        optimizer.zero_grad()
        loss, weight = task.loss(model, squares())
        assert weight == 8
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return task, model, losses


def test_words_have_golden_buckets() -> None:
    """A run's weights mean nothing under another hash: these numbers must never change."""
    assert words_of("Keycap: 1 O'Clock, Piñata-time") == ["keycap", "1", "o", "clock", "piñata", "time"]
    assert [word_bucket(word, 8192) for word in ("face", "piñata", "1")] == [7015, 1560, 4023]


def test_the_loss_falls_and_the_right_words_are_found() -> None:
    task, model, losses = trained(60)
    assert losses[0] > 1.5
    assert sum(losses[-10:]) / 10 < 0.5 * losses[0]
    share, weight = task.evaluate(model.eval(), squares())["top5_seen"]
    assert share > 0.9
    assert weight == 8


def test_the_same_seeds_give_the_same_weights() -> None:
    first, again, other = (trained(2, seed)[1].state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_every_parameter_gets_a_gradient() -> None:
    task = small_task()
    model = task.model()
    task.loss(model, squares())[0].backward()
    assert [name for name, item in model.named_parameters() if item.grad is None or not item.grad.any()] == []


def test_a_micro_batch_of_one_has_a_loss() -> None:
    task = small_task()
    batch = squares()
    one = {"image": batch["image"][:1], "text": texts(["red square"]), "id": batch["id"][:1]}
    loss, weight = task.loss(task.model(), one)
    assert (loss.item(), weight) == (0, 1)
    assert loss.requires_grad


def brute_force(similarity: np.ndarray, top: int) -> float:
    order = np.argsort(-similarity, axis=1)[:, :top]
    return float(np.mean([row in order[row] for row in range(len(similarity))]))


@pytest.mark.parametrize("size", [1, 4, 5, 6, 190])
def test_top_share_equals_brute_force(size: int) -> None:
    similarity = torch.randn(size, size, generator=torch.Generator().manual_seed(size))
    similarity += torch.eye(size)
    assert top_share(similarity, 5) == pytest.approx(brute_force(similarity.numpy(), 5))


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_model_that_tells_nothing_apart_gets_no_share(value: float) -> None:
    assert top_share(torch.full((20, 20), value), 5) == 0


def test_evaluation_equals_brute_force_over_seen_and_unseen() -> None:
    task = small_task()
    torch.manual_seed(1)
    seen = torch.tensor([1, 0] * 100)
    lines = [f"{NAMES[row % 8]} {row} {NAMES[row // 8 % 8]}" for row in range(200)]
    image = torch.randint(0, 256, (200, 32, 32, 3), dtype=torch.uint8)
    model = task.model().eval()
    metrics = task.evaluate(model, {"image": image, "text": texts(lines), "seen": seen})
    with torch.no_grad():
        pictures = model.picture(image.permute(0, 3, 1, 2) / 255).numpy()
        bags = [torch.tensor([word_bucket(word, 512) for word in line.split()]) for line in lines]
        words = torch.cat([model.words(bag, torch.tensor([0])) for bag in bags]).numpy()
    for name, rows in (("top5_seen", seen == 1), ("top5_unseen", seen == 0)):
        share, weight = metrics[name]
        assert share == pytest.approx(
            brute_force(pictures[rows] @ words[rows].T, 5), abs=0.011
        )  # one may tie
        assert weight == 100


def test_evaluation_of_seen_concepts_alone_has_one_metric() -> None:
    task = small_task()
    assert list(task.evaluate(task.model(), squares())) == ["top5_seen"]
    assert list(task.evaluate(task.model(), squares([1] * 8))) == ["top5_seen"]


def test_an_evaluation_batch_that_is_too_small_is_refused() -> None:
    task = small_task()
    with pytest.raises(ConfigError, match=r"holds 6 of 8 seen concepts.*set data.evaluate_batch"):
        task.evaluate(task.model(), squares([1] * 6 + [0] * 2))
    batch = squares()
    del batch["seen"]
    with pytest.raises(ConfigError, match="no field seen, only id, image, text"):
        task.evaluate(task.model(), batch)


@pytest.mark.parametrize("drop_words", [0.0, 0.3, 0.99])
def test_dropping_keeps_a_part_of_each_text_and_never_empties_one(drop_words: float) -> None:
    torch.manual_seed(0)
    task = small_task(drop_words=drop_words)
    counts = [1, 3, 0, 50, 0, 2000]
    bucket = torch.arange(sum(counts))
    offsets = torch.tensor([0, *np.cumsum(counts)[:-1].tolist()])
    kept, begins = task._drop(bucket, offsets)
    pieces = torch.tensor_split(kept, begins[1:])
    for piece, whole in zip(pieces, torch.tensor_split(bucket, offsets[1:]), strict=True):
        assert set(piece.tolist()) <= set(whole.tolist())
        assert (len(piece) > 0) == (len(whole) > 0)
    assert len(pieces[-1]) == pytest.approx(2000 * (1 - drop_words), abs=60)


def test_pictures_are_normalised_with_the_packed_numbers() -> None:
    tower = small_task().model().picture
    torch.testing.assert_close(tower.mean.flatten() * 255, torch.tensor([200.0, 190.0, 180.0]))
    torch.testing.assert_close(tower.std.flatten() * 255, torch.tensor([60.0, 70.0, 80.0]))


@pytest.mark.parametrize("dataset", [info(shape=(64, 64, 3)), info(text="dense"), DatasetInfo({}, None, 1)])
def test_another_set_is_refused(dataset: DatasetInfo) -> None:
    with pytest.raises(ConfigError, match=r"emoji needs image \(32, 32, 3\) and a text.*--size 32"):
        Emoji().setup(dataset)


@pytest.mark.parametrize(
    "options",
    [{"drop_words": 1.0}, {"shift": -0.1}, {"invert": 2}, {"width": 12}, {"width": 0}, {"buckets": 0}],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ConfigError, match=f"task.options.*{name} = {value}"):
        Emoji(**options)
