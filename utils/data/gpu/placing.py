"""Where the images of a run live: on the card beside training, in page-locked memory of the host, or as without a GPU.

The first place that has room in all processes of a run is taken; a line of the log says which, why, and how many GB.
"""

import gc
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from utils.data.dataset import LoadImagesAndLabels
from utils.data.fast.deferred import DeferredDataset, steps_bytes
from utils.data.fast.shm_batches import LateSteps
from utils.data.gpu.compose import open_composing, why_not_composed
from utils.data.gpu.filling import Filler
from utils.data.gpu.host_memory import HostMemory, machine_mates
from utils.data.gpu.store import ImageStore
from utils.data.image_cache import layout, use_memory_cache, views
from utils.system import distributed
from utils.system.cores import usable_cores
from utils.system.memory import available_memory, describe_bytes, is_out_of_memory
from utils.system.random_state import generators_kept

logger = logging.getLogger(__name__)

CARD_RESERVE = 0.1  # share of the card's memory that stays free: for fragments, validation, images with more boxes
HOST_RESERVE = 0.1  # share of the host's free memory that stays free: page-locked memory is never swapped
HOST_LEAST = 2 * 10**9  # bytes that always stay free there
FEW_SAMPLES = 16
SURPLUS = 1.5  # workers are fast enough that make so many times what the GPU trains, measured without a graph


class Place(NamedTuple):
    """Whether the images lie in the memory of the card, of the host, or of both: then workers read the latter."""

    on_card: bool
    on_host: bool


CARD, BOTH, HOST = Place(True, False), Place(True, True), Place(False, True)
NAMES = {
    CARD: "on the GPU, beside the model",
    BOTH: "on the GPU, beside the model, and in RAM for the workers, which cut out objects to paste",
    HOST: "in page-locked memory, which the GPU reads over PCIe",
}


def possible_places(num_bytes: int, on_card: float, on_host: float, workers_read: bool) -> list[Place]:
    """Where `num_bytes` of images fit, the best first; `on_card` and `on_host` are the bytes that are free for them.

    `workers_read`: the workers make some of the samples, and need the images too.
    """
    places = []
    if num_bytes <= on_card:
        places += [BOTH] * (workers_read and num_bytes <= on_host) + [CARD]
    return places + [HOST] * (num_bytes <= on_host)


def room_on_card(device: torch.device, num_bytes: int, step_cost: Callable[[], tuple]) -> tuple[float, str]:
    """Bytes of the card's memory that are free for images, and how that was found.

    Only if `num_bytes` may fit, `step_cost` measures what training takes. Blocks that torch keeps are returned first.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    free -= int(CARD_RESERVE * total)
    if num_bytes > free:
        return free, f"the GPU has {describe_bytes(max(free, 0))} free"
    training, _ = step_cost()
    if training == math.inf:
        return -1, "training alone fills the GPU"
    return free - training, f"the GPU has {describe_bytes(max(free - training, 0))} free beside training, " \
                            f"which takes {describe_bytes(training)}"  # fmt: skip


def room_on_host() -> float:
    """Bytes of the host's memory, or of this container's, that images may take."""
    available = available_memory()
    return math.inf if available is None else available - max(HOST_RESERVE * available, HOST_LEAST)


def open_images(
    dataset: LoadImagesAndLabels, workers: int, with_groups: bool, *, device: torch.device,
    step_cost: Callable[[], tuple], prefix: str = "", is_shared: bool = False, is_asked: bool = True,
) -> LateSteps | None:  # fmt: skip
    """Read all images of `dataset` to where they fit, and return the LateSteps with which `workers` only draw.

    None where no GPU composes the samples. If the user has asked for it, the images are in RAM then, as with
    --cache-images ram; raises ValueError if not even RAM has room. Otherwise nothing is read, nor if the workers are
    fast enough. `step_cost` measures the bytes of the card and the seconds an image that training takes. `with_groups`:
    four samples become one image. With `is_shared` all processes of the run call this at the same time, with equal data
    sets.
    """
    size = describe_bytes(int(layout(dataset, dataset.img_size)[1][-1]))
    obstacle = why_not_composed(dataset, with_groups) if workers else "there are no workers of --worker-tensor"
    obstacle = _of_all(obstacle, is_shared)  # machines differ, and --workers may
    if obstacle is None and not is_asked:
        obstacle = _of_all(why_fast_enough(dataset, workers, step_cost), is_shared, all)
    problems = [obstacle or ""]
    if not obstacle:
        dataset.image_store, problems = open_store(dataset, device, step_cost, prefix, is_shared)
        late = open_composing(dataset, with_groups)
        if not _of_all(late is None, is_shared):
            return late
        _forget_store(dataset, problems)
    if is_asked:
        logger.warning("%simages: %s in RAM, as with --cache-images ram: %s", prefix, size, "; ".join(problems))
        use_memory_cache(dataset, prefix)
    else:
        logger.info("%simages: %s read from their files: %s", prefix, size, "; ".join(problems))
    return None


def open_store(
    dataset: LoadImagesAndLabels, device: torch.device, step_cost: Callable[[], tuple], prefix: str = "",
    is_shared: bool = False,
) -> tuple[ImageStore | None, list[str]]:  # fmt: skip
    """(all images of `dataset`, where a kernel reads them, or None; what was found on the way); see `open_images`.

    `dataset.imgs` are those in the memory of the host, if they are there.
    """
    num_bytes = int(layout(dataset, dataset.img_size)[1][-1])
    on_card, why = room_on_card(device, num_bytes, step_cost)
    on_host, size, problems = room_on_host(), describe_bytes(num_bytes), [why]
    for place in _in_common(possible_places(num_bytes, on_card, on_host, workers_read(dataset)), is_shared):
        store, problem = _filled(dataset, place, num_bytes, device, is_shared, f"{prefix}Reading images ({size})")
        if store is not None:
            logger.info("%simages: %s %s: %s", prefix, size, NAMES[place], "; ".join(problems))
            return store, problems
        torch.cuda.empty_cache()  # what was taken on the card
        problems.append(problem)
    if num_bytes > on_host:
        problems.append(f"{describe_bytes(max(on_host, 0))} of memory can be page-locked")
    return None, problems


def _forget_store(dataset, problems):
    """Undo `open_store`, if it has opened one that the GPU cannot compose from."""
    if dataset.image_store is not None:
        dataset.image_store.close()
        dataset.image_store, dataset.imgs = None, [None] * dataset.n
        problems[:] = ["the GPU does not compose as the host does"]


def why_fast_enough(dataset: LoadImagesAndLabels, workers: int, step_cost: Callable[[], tuple]) -> str | None:
    """Why the workers of `dataset` need no help of the GPU, in words; None if they are too slow for it."""
    cores = usable_cores() // len(machine_mates())
    by_workers, by_gpu = min(workers, cores) / seconds_of_sample(dataset), 1 / step_cost()[1]
    if by_workers < SURPLUS * by_gpu:
        return None
    return f"{workers} workers make about {by_workers:.0f} images/s, the GPU trains about {by_gpu:.0f}"


def seconds_of_sample(dataset: LoadImagesAndLabels) -> float:
    """CPU time of a sample whose last steps are deferred, measured on a few."""
    deferred = DeferredDataset(dataset)
    deferred.begin(np.zeros(steps_bytes(dataset.img_size, with_affine=True), np.uint8))
    chosen = np.linspace(0, dataset.n - 1, 2 * FEW_SAMPLES).astype(int).tolist()
    with generators_kept():
        for i in chosen[::2]:  # the first ones take longer
            deferred[i]
        started = time.thread_time()
        for i in chosen[1::2]:
            deferred[i]
        return max((time.thread_time() - started) / FEW_SAMPLES, 1e-6)


def workers_read(dataset: LoadImagesAndLabels) -> bool:
    """Whether the workers need pixels for some of the samples: they cut out the objects that are pasted in."""
    return dataset.augment and bool(dataset.hyp["paste_in"])


def _filled(dataset, place, num_bytes, device, is_shared, title):
    """(the ImageStore at `place`, None), or (None, what keeps one of the processes from having it)."""
    memory, card, problem = None, None, None
    try:
        if place.on_host:
            memory = HostMemory(num_bytes, is_shared)
        if place.on_card:
            card = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            problem = memory.lock(device)
    except Exception as error:
        problem = lack_of_memory(error)
    problem = _of_all(problem, is_shared)
    if problem is None:
        filler = Filler(dataset, memory and memory.bytes, card, _share(place, is_shared))
        try:
            filler.decode(title)
        except Exception as error:
            problem = lack_of_memory(error)
        problem = _of_all(problem, is_shared)  # after this all processes have decoded their pieces
    if problem is not None:
        if memory is not None:
            memory.free()
        return None, problem
    filler.take_others()
    host = None
    if memory is not None:
        host = memory.bytes.view()
        host.flags.writeable = False
        dataset.imgs = views(host, filler.shapes, filler.ends)
    pixels = memory.on_device(device) if card is None else card
    return ImageStore(pixels, filler.shapes, host, memory and partial(_release, memory, is_shared)), None


def lack_of_memory(error: Exception) -> str:
    """What to say of an error that another place for the images may avoid; any other one is raised."""
    if isinstance(error, (MemoryError, OSError)) or is_out_of_memory(error):
        return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    raise error


def _of_all(problem, is_shared, quantifier=any):
    """The first problem that a process of the run has, if any of them (or all of them) has one; None without."""
    problems = distributed.gather_everywhere(problem) if is_shared else [problem]
    return next(filter(None, problems)) if quantifier(problems) else None


def _in_common(places, is_shared):
    """Those of `places` that all processes of the run have."""
    everywhere = distributed.gather_everywhere(places) if is_shared else [places]
    return [place for place in places if all(place in found for found in everywhere)]


def _share(place, is_shared):
    """(number, of how many): the part of the images that this process decodes."""
    if not is_shared:
        return 0, 1
    ranks = distributed.read_ranks()
    if not place.on_host:
        return ranks.rank, ranks.world_size
    mates = machine_mates()
    return mates.index(ranks.rank), len(mates)


def _release(memory, is_shared):
    if is_shared:  # the GPU of another process may still read
        distributed.gather_everywhere(None)
    memory.free()
