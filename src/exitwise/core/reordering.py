"""Put items that arrive in any order back into the order of their index. Imports neither NumPy nor torch."""

from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReorderBuffer(Generic[Item]):
    """Items that arrive in any order and are returned in the order of their index, which counts from 0."""

    def __init__(self) -> None:
        self._items: dict[int, Item] = {}
        self._next_index = 0

    def add(self, index: int, item: Item) -> None:
        self._items[index] = item

    def pop_ready(self) -> list[Item]:
        """Remove and return the items up to the first that is still missing."""
        ready = []
        while self._next_index in self._items:
            ready.append(self._items.pop(self._next_index))
            self._next_index += 1
        return ready

    @property
    def next_index(self) -> int:
        """Index of the first item that is missing."""
        return self._next_index
