"""Contrastive pictures and words: which text belongs to this drawing of an emoji?

Two towers put a picture and its words into one space; the loss is the symmetric InfoNCE of CLIP (Radford et
al. 2021, arXiv:2103.00020, figure 3). The negatives of a sample are the other samples of its lane's
micro-batch, so `lanes.lane_batch` is part of what is learnt, and the same on however many ranks.

It is trained on one drawing style and tested on another. Colours, strokes and shading carry over badly, hence
the strong colour augmentation; where things are carries over well, hence no global pooling: averaged over the
picture, the same tower got 0.21 of the seen concepts right instead of 0.45.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from hpctrain.errors import ConfigError
from hpctrain.recipes.augment import jitter_colours, move_and_scale
from hpctrain.training.task import Batch, DatasetInfo, Task

_WORD: Final = re.compile(r"\w+")
_MAX_LOG_SCALE: Final = math.log(
    100.0
)  # CLIP's bound: beyond it, the softmax is one-hot and training unstable
_EVALUATE_PICTURES: Final = 256  # per forward pass: the activations stay in the cache
_SIDE: Final = 32
_WHITE: Final = 1.0
_TOP: Final = 5


def word_bucket(word: str, buckets: int) -> int:
    """The row of a word in the embedding, 0 to `buckets` - 1, by its CRC-32: the same on every machine."""
    return zlib.crc32(word.encode()) % buckets


def words_of(text: str) -> list[str]:
    """Lower-case words, without punctuation."""
    return _WORD.findall(text.lower())


@lru_cache(maxsize=1 << 16)
def _buckets_of(text: bytes, buckets: int) -> list[int]:
    return [word_bucket(word, buckets) for word in words_of(text.decode(errors="replace"))]


class PictureTower(nn.Module):
    """RGB pictures (B, 3, 32, 32), float from 0 to 1, to unit vectors (B, dim)."""

    def __init__(self, width: int, dim: int, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))
        self.layers = nn.Sequential(
            *_halving(3, width, kernel=6),
            *_halving(width, 2 * width, kernel=3),
            *_halving(2 * width, 4 * width, kernel=3),
            nn.Flatten(),
            nn.Linear(4 * width * (_SIDE // 8) ** 2, dim),
        )

    def forward(self, picture: Tensor) -> Tensor:
        """See the class."""
        return functional.normalize(self.layers((picture - self.mean) / self.std), dim=1)


def _halving(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    """Layers that halve the side of the picture."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=(kernel - 1) // 2, bias=False)
    return [convolution, nn.GroupNorm(8, outputs), nn.ReLU()]


class WordTower(nn.Module):
    """Bags of words to unit vectors (B, dim): the mean of the words' embeddings, then a perceptron."""

    def __init__(self, buckets: int, width: int, dim: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(buckets, width, mode="mean")
        nn.init.normal_(self.words.weight, std=0.1)
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, dim)
        )

    def forward(self, bucket: Tensor, offsets: Tensor) -> Tensor:
        """`bucket`: all words of all texts; `offsets`: where each text's begin (B,)."""
        return functional.normalize(self.layers(self.words(bucket, offsets)), dim=1)


class TwoTowers(nn.Module):
    """Pictures and texts in one space of `dim` dimensions, compared by cosine times a learnt scale."""

    def __init__(self, picture: PictureTower, words: WordTower) -> None:
        super().__init__()
        self.picture = picture
        self.words = words
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # CLIP's first temperature

    def forward(self, picture: Tensor, bucket: Tensor, offsets: Tensor) -> Tensor:
        """Logits (B, B): row i, how well each text fits picture i."""
        scale = self.log_scale.clamp(max=_MAX_LOG_SCALE).exp()
        logits: Tensor = scale * self.picture(picture) @ self.words(bucket, offsets).T
        return logits


class Emoji(Task):
    """Contrastive training on fields `image` (32, 32, 3) uint8 and `text` (UTF-8), evaluated with `seen` too.

    Options: `width` channels of the first layer (a multiple of 8), `dim` of the common space, `buckets` rows
    and `word_width` columns of the word embedding; `drop_words` the share of words left out; `shift`,
    `scale`, `mix`, `gain`, `grey`, `invert` as in `hpctrain.recipes.augment`.
    """

    def __init__(
        self,
        *,
        width: int = 32,
        dim: int = 128,
        buckets: int = 8192,
        word_width: int = 128,
        drop_words: float = 0.3,
        shift: float = 0.1,
        scale: float = 0.15,
        mix: float = 0.3,
        gain: float = 0.3,
        grey: float = 0.1,
        invert: float = 0.05,
    ) -> None:
        shares = {"drop_words": drop_words, "shift": shift, "scale": scale, "mix": mix, "gain": gain}
        for name, share in (shares | {"grey": grey, "invert": invert}).items():
            if not 0 <= share < 1:
                raise ConfigError(f"task.options.{name} = {share}: must be at least 0 and less than 1")
        if width % 8 or min(width, dim, buckets, word_width) < 1:
            raise ConfigError(
                f"task.options: width = {width} must be a multiple of 8, and dim = {dim}, "
                f"buckets = {buckets} and word_width = {word_width} at least 1"
            )
        self._width, self._dim, self._buckets, self._word_width = width, dim, buckets, word_width
        self._drop_words, self._shift, self._scale = drop_words, shift, scale
        self._mix, self._gain, self._grey, self._invert = mix, gain, grey, invert
        self._mean, self._std = [0.5] * 3, [0.5] * 3
        self._num_seen = 0

    def setup(self, dataset: DatasetInfo) -> None:
        """Take the pictures' mean and deviation; raises `ConfigError` for a set without the fields needed."""
        image, text = dataset.fields.get("image"), dataset.fields.get("text")
        if image is None or image.sample_shape != (_SIDE, _SIDE, 3) or text is None or text.kind != "ragged":
            found = {name: field.sample_shape for name, field in dataset.fields.items()}
            raise ConfigError(
                f"the training set has fields {found}, but emoji needs image ({_SIDE}, {_SIDE}, 3) and a text: "
                f"make them with hpctrain data emoji DIR and hpctrain pack DIR/train DST --size {_SIDE}"
            )
        self._mean, self._std = _per_channel(image.mean), _per_channel(image.std)
        self._num_seen = dataset.num_samples

    def model(self) -> TwoTowers:
        """Two small towers, 1.5 million parameters by default."""
        return TwoTowers(
            PictureTower(self._width, self._dim, self._mean, self._std),
            WordTower(self._buckets, self._word_width, self._dim),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """The mean of both directions' cross entropy over the micro-batch, and the number of samples."""
        bucket, offsets = self._drop(*self._words(batch))
        logits = model(self._augmented(_pictures(batch)), bucket, offsets)
        own = torch.arange(len(logits), device=logits.device)
        mean = (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2
        return mean, float(len(logits))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        """`top5_seen` and `top5_unseen`: the share of pictures whose own text is among the five nearest.

        Candidates are the texts of the seen concepts for seen pictures, of the unseen ones for the others:
        the batch must hold the whole test set. Raises `ConfigError` where it holds fewer seen concepts than
        were trained on.
        """
        assert isinstance(model, TwoTowers)
        if "seen" not in batch:
            raise ConfigError(
                f"the evaluation set has no field seen, only {', '.join(sorted(batch))}; pack DIR/test"
            )
        seen = batch["seen"].bool()
        if int(seen.sum()) < self._num_seen:
            raise ConfigError(
                f"an evaluation batch holds {int(seen.sum())} of {self._num_seen} seen concepts, and top-5 "
                "among fewer is easier; set data.evaluate_batch to at least the size of the test set"
            )
        parts = torch.split(_pictures(batch), _EVALUATE_PICTURES)
        pictures = torch.cat([model.picture(part) for part in parts])
        texts = model.words(*self._words(batch))
        chosen = {"top5_seen": seen, "top5_unseen": ~seen}
        return {
            name: (top_share(pictures[rows] @ texts[rows].T, _TOP), float(rows.sum()))
            for name, rows in chosen.items()
            if rows.any()
        }

    def _words(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Buckets of all words of the batch, and where each text's begin (B,)."""
        values, offsets = batch["text"]["values"], batch["text"]["offsets"].tolist()
        raw = values.cpu().numpy().tobytes()
        bags = [_buckets_of(raw[begin:end], self._buckets) for begin, end in pairwise(offsets)]
        begins = list(accumulate((len(bag) for bag in bags), initial=0))[:-1]
        bucket = torch.tensor([word for bag in bags for word in bag], dtype=torch.int64, device=values.device)
        return bucket, torch.tensor(begins, dtype=torch.int64, device=values.device)

    def _drop(self, bucket: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Leave out words at random; a text that would lose all keeps all."""
        ends = torch.cat([offsets[1:], offsets.new_tensor([len(bucket)])])
        owner = torch.repeat_interleave(torch.arange(len(offsets), device=bucket.device), ends - offsets)
        keep = torch.rand(len(bucket), device=bucket.device) >= self._drop_words
        keep |= (torch.bincount(owner[keep], minlength=len(offsets)) == 0)[owner]
        counts = torch.bincount(owner[keep], minlength=len(offsets))
        return bucket[keep], counts.cumsum(0) - counts

    def _augmented(self, picture: Tensor) -> Tensor:
        moved = move_and_scale(picture, self._shift, self._scale, fill=_WHITE)
        return jitter_colours(moved, self._mix, self._gain, self._grey, self._invert)


def top_share(similarity: Tensor, top: int) -> float:
    """Share of rows i of (N, N) with column i among the `top` largest; ties and NaN count as misses."""
    own = similarity.diagonal()[:, None]
    not_worse = (~(similarity < own)).sum(1)  # itself included
    return float((not_worse <= top).double().mean())


def _pictures(batch: Batch) -> Tensor:
    """The batch's pictures (B, 3, 32, 32), float from 0 to 1, from uint8 (B, 32, 32, 3)."""
    image: Tensor = batch["image"]
    return image.permute(0, 3, 1, 2).float() / 255


def _per_channel(value: tuple[float, ...] | float | None) -> list[float]:
    """A packed mean or deviation, in 0 to 255, as three numbers from 0 to 1."""
    return [number / 255 for number in torch.as_tensor(value).expand(3).tolist()]
