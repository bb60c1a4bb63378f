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
        self.pixels: torch.Tensor | None = pixels
        self.host, self._release = host, release
        self.shapes = np.asarray(shapes, np.int32).reshape(-1, 2)
        sizes = 3 * self.shapes.astype(np.int64).prod(1)
        self.offsets = sizes.cumsum() - sizes

    def close(self) -> None:
        """Free the memory once the GPU has read what it is reading; the store is of no use afterwards."""
        if self.pixels is not None and self.pixels.is_cuda:
            torch.cuda.synchronize(self.pixels.device)
        self.pixels, self.host, release, self._release = None, None, self._release, None
        if release is not None:
            release()
