"""The batches of a validation set, made once: the first validation remembers them where the GPU reads them.

They never change, as nothing is drawn. From the second validation on there is nothing to decode, and no workers.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from utils.data.dataset import LoadImagesAndLabels
from utils.data.gpu.host_memory import HostMemory
from utils.data.gpu.placing import CARD, NAMES, lack_of_memory, possible_places, room_on_card, room_on_host
from utils.system.memory import describe_bytes

logger = logging.getLogger(__name__)

# Without --cache-images gpu kept batches take at most these shares of the card, and of the free memory of the host.
UNASKED_ON_CARD, UNASKED_ON_HOST = 0.02, 0.25


class KeptBatches:
    """The batches of `loader`, whose images [b x 3 x h x w] have their place in `pixels` uint8 [bytes] from then on.

    `memory` owns `pixels`, and has to live as long.
    """

    def __init__(self, loader: Any, pixels: torch.Tensor, memory: Any = None) -> None:
        self.loader, self.pixels, self.memory = loader, pixels, memory
        self.dataset, self.batch_size, self.length = loader.dataset, loader.batch_size, len(loader)
        self.batches: list[tuple] = []

    def __len__(self) -> int:
        return self.length

    def begin(self) -> None:
        """Let the workers of the loader begin, if it can."""
        getattr(self.loader, "begin", lambda: None)()

    def __iter__(self) -> Iterator[tuple]:
        if self.loader is None:
            yield from self.batches
            return
        kept, end = [], 0
        for images, targets, paths, shapes in self.loader:
            start, end = end, end + images.numel()
            place = self.pixels[start:end].view(images.shape)
            place.copy_(images, non_blocking=True)
            kept.append((place, targets.clone(), paths, shapes))
            yield kept[-1]
        self.batches, loader, self.loader = kept, self.loader, None
        if hasattr(loader, "close"):  # its workers have nothing more to do
            loader.close()


def keep(loader: Any, *, device: torch.device, step_cost: Callable[[], tuple], is_asked: bool = True) -> Any:
    """`loader` as KeptBatches on the card, or in page-locked memory; itself where neither has room.

    `is_asked`: with --cache-images gpu, which gives them all the room that training leaves; `step_cost` measures it.
    The batches of a process that validates a share of the images get such a share of the host's memory.
    """
    num_bytes = bytes_of_batches(loader.dataset)
    on_card, why = room_on_card(device, num_bytes, step_cost) if is_asked else room_unasked(device)
    share = loader.dataset.n / loader.dataset.total  # the other processes ask for as much at the same time
    on_host = room_on_host() * share * (1 if is_asked else UNASKED_ON_HOST)
    problems, size = [why], describe_bytes(num_bytes)
    for place in possible_places(num_bytes, on_card, on_host, workers_read=False):
        try:
            memory = HostMemory(num_bytes) if place != CARD else None
            if memory is None:
                pixels, problem = torch.empty(num_bytes, dtype=torch.uint8, device=device), None
            else:
                pixels, problem = torch.from_numpy(memory.bytes), memory.lock(device)
        except Exception as error:
            problem = lack_of_memory(error)
        if problem is None:
            logger.info("val: batches: %s stay %s: %s", size, NAMES[place], "; ".join(problems))
            return KeptBatches(loader, pixels, memory)
        problems.append(problem)
    logger.info("val: batches: %s are made anew each time: %s", size, "; ".join(problems))
    return loader


def room_unasked(device: torch.device) -> tuple[float, str]:
    """Bytes of the card that are taken without a measurement of what training takes, and how that was found."""
    free, total = torch.cuda.mem_get_info(device)
    room = min(UNASKED_ON_CARD * total, free)
    return room, f"{describe_bytes(room)} of the GPU are taken without --cache-images gpu"


def bytes_of_batches(dataset: LoadImagesAndLabels) -> int:
    """What the images of all batches of a data set that is not augmented take."""
    if not dataset.rect:
        return 3 * dataset.n * dataset.img_size**2
    return 3 * int(dataset.batch_shapes.prod(1)[dataset.batch].sum())
