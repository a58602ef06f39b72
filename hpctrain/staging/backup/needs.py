"""Which objects generations need, and what for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpctrain.staging.backup.generations import Generation
from hpctrain.staging.backup.recipe import read_page
from hpctrain.staging.backup.store import Store
from hpctrain.staging.backup.table import MissingObjectError


@dataclass(frozen=True)
class Reference:
    """A part of a recipe: who uses it, in words, and the objects that it needs.

    `lost`: why not all of those are known, in words; None: they are.
    """

    user: str
    names: tuple[bytes, ...]
    lost: str | None = None


def references(store: Store, generations: Iterable[Generation]) -> Iterator[Reference]:
    """All that generations need. Each page is read once. Raises `DataError` for a page that is none, `StorageError`."""
    known: dict[bytes, tuple[tuple[bytes, ...], str | None]] = {}
    for generation in generations:
        for recipe in generation.files:
            user = f"{generation.label} {recipe.name}"
            yield Reference(user, recipe.rest)
            for number, page in enumerate(recipe.pages):
                if page not in known:
                    try:
                        names = read_page(store, recipe, number)["digest"].tobytes()
                        known[page] = tuple(names[at : at + 32] for at in range(0, len(names), 32)), None
                    except MissingObjectError as error:
                        known[page] = (), str(error)
                names_below, lost = known[page]
                yield Reference(user, (page, *names_below), lost)
