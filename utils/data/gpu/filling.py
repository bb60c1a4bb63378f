"""Decode the images of a data set straight to where they stay, as fast as the cores decode.

Processes share the work: each decodes its share of the pieces, and gets the others from those that decoded them.
"""

import threading
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from utils.data.image_cache import layout, read_in_threads
from utils.data.training_size import load_scanned

PIECE_BYTES = 16 << 20  # so much each thread decodes and copies at a time


class Piece(NamedTuple):
    """Some images in a row, by their numbers, and the bytes `start` to `stop` of the whole that they take."""

    images: range
    start: int
    stop: int

    def __len__(self):
        return len(self.images)


class Filler:
    """Fills `host`, `card` or both (uint8 [bytes]: a NumPy array, a tensor) with the images of `dataset`.

    This process decodes the pieces `share` (number, of how many). With both, `card` is copied from `host`.
    """

    def __init__(self, dataset, host: np.ndarray | None, card: torch.Tensor | None, share: tuple[int, int] = (0, 1)):
        self.dataset, self.host, self.card = dataset, host, card
        self.number, self.count = share
        self.shapes, self.ends = layout(dataset, dataset.img_size)
        self.pieces = cut(self.ends)
        self.staging = threading.local()

    def decode(self, title: str) -> None:
        """Read this process's pieces from their files. Raises ValueError for an image that cannot be read."""
        mine = self.pieces[self.number :: self.count]
        read_in_threads(self._decode, mine, title)

    def take_others(self) -> None:
        """Get what the other processes have decoded; all of them have to call it, after `decode`."""
        if self.card is None or self.count == 1:
            return
        for number, piece in enumerate(self.pieces):
            part, owner = self.card[piece.start : piece.stop], number % self.count
            if self.host is None:
                dist.broadcast(part, owner)
            elif owner != self.number:
                part.copy_(torch.from_numpy(self.host[piece.start : piece.stop]))

    def _decode(self, piece):
        if self.card is not None and self.card.is_cuda:
            torch.cuda.set_device(self.card.device)  # a new thread uses the first GPU, and would take memory there
        size = piece.stop - piece.start
        place = self._staging(size) if self.host is None else self.host[piece.start : piece.stop]
        for i in piece.images:
            height, width = self.shapes[i]
            end = int(self.ends[i]) - piece.start
            img = place[end - 3 * height * width : end].reshape(height, width, 3)
            img[:] = load_scanned(self.dataset, i, (height, width))
        if self.card is not None:
            self.card[piece.start : piece.stop].copy_(torch.from_numpy(place))

    def _staging(self, size):
        """Memory of this thread, from which copies to a GPU are quick."""
        place = getattr(self.staging, "place", None)
        if place is None:
            most = max(piece.stop - piece.start for piece in self.pieces)
            pinned = {"pin_memory": True} if self.card.is_cuda else {}
            place = self.staging.place = torch.empty(most, dtype=torch.uint8, **pinned).numpy()
        return place[:size]


def cut(ends: np.ndarray) -> list[Piece]:
    """All images in Pieces of up to PIECE_BYTES, or of one image; `ends` [n]: where the bytes of each end."""
    pieces, first, start = [], 0, 0
    for i, end in enumerate(ends.tolist()):
        following = int(ends[i + 1]) if i + 1 < len(ends) else None
        if following is None or following - start > PIECE_BYTES:
            pieces.append(Piece(range(first, i + 1), start, end))
            first, start = i + 1, end
    return pieces
