"""The images of a data set where a kernel of the GPU can read them."""

from collections.abc import Callable

import numpy as np
import torch


class ImageStore:
    """All images of a data set at its training size, one after the other in one piece of memory.

    `pixels` uint8 [bytes] are rows of BGR without padding: a tensor on the GPU, or page-locked memory of the host as a
    CUDA tensor, which a kernel reads over PCIe. `host` are the same bytes as a NumPy array where the host has them,
    else None. Image i begins at `offsets[i]` (int64 [n]) and has `shapes[i]` (int32 [n x 2]: height, width).
    """

    def __init__(
        self,
        pixels: torch.Tensor,
        shapes: np.ndarray | list,
        host: np.ndarray | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.pixels, self.host, self._release = pixels, host, release
        self.shapes = np.asarray(shapes, np.int32).reshape(-1, 2)
        sizes = 3 * self.shapes.astype(np.int64).prod(1)
        self.offsets = sizes.cumsum() - sizes

    def read(self, number: int) -> np.ndarray:
        """Image `number` [h x w x 3: BGR], a copy on the host."""
        start, (height, width) = int(self.offsets[number]), self.shapes[number].tolist()
        return self.pixels[start : start + 3 * height * width].cpu().numpy().reshape(height, width, 3)

    def close(self) -> None:
        """Free the memory once the GPU has read what it is reading; the store is of no use afterwards."""
        if self.pixels.is_cuda:
            torch.cuda.synchronize(self.pixels.device)
        self.pixels, self.host = self.pixels.new_empty(0), None
        torch.cuda.empty_cache()  # or torch would keep the room for its own tensors
        release, self._release = self._release, None
        if release is not None:
            release()
