"""Batches copied ahead: the bytes, their numbers, and no memory filled again while somebody needs it."""

import pytest
import torch

from utils.engine.batches import plain
from utils.fast.prefetcher import Prefetcher, Slot, as_float, to_device

CPU = torch.device("cpu")


def loader(*sizes, valid=None):
    """Batches of different values; each is destroyed when the next is asked for, as those of a SharedMemoryLoader."""
    for i, size in enumerate(sizes):
        images = torch.full((size, 3, 4, 6), i, dtype=torch.uint8)
        images[0, 0, 0, 0] = 255 - i
        yield images, torch.full((i, 6), float(i)), tuple(f"{i}_{k}.jpg" for k in range(size)), None
        images.fill_(99)


def test_batches_are_those_of_the_plain_feed():
    found, expected = Prefetcher()(loader(2, 2, 3, 1, 2), CPU), plain(loader(2, 2, 3, 1, 2), CPU)
    for mine, reference in zip(found, expected, strict=True):
        assert mine.images.dtype == torch.uint8
        assert torch.equal(as_float(mine.images), reference.images)
        assert torch.equal(mine.targets, reference.targets) and mine.paths == reference.paths
    assert list(Prefetcher()([], CPU)) == []


def test_floats_on_request():
    (batch,) = Prefetcher(floats=True)(loader(2), CPU)
    assert batch.images.dtype == torch.float32 and batch.images.max() == 1.0


def test_targets_can_stay_elsewhere():
    loader = [(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.ones(2, 6), (), None)]
    (batch,) = Prefetcher(targets_device=CPU)(loader, torch.device("meta"))
    assert batch.images.device.type == "meta" and batch.targets.device.type == "cpu"


def test_every_byte_becomes_the_number_of_the_reference():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    numbers = as_float(images)
    assert torch.equal(numbers, images.float() / 255)
    assert numbers.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(as_float(numbers), numbers)


def test_a_slot_is_filled_again_only_after_the_work_on_it(monkeypatch):
    """The order of events: a slot is waited for before it is filled, and released when the next batch is asked for."""
    log = []
    for name in ("wait", "fill", "release"):
        original = getattr(Slot, name)

        def logged(slot, *arguments, name=name, original=original):
            log.append((name, prefetcher.slots.index(slot)))
            return original(slot, *arguments)

        monkeypatch.setattr(Slot, name, logged)
    prefetcher = Prefetcher(ahead=2)
    for number, _ in enumerate(prefetcher(loader(1, 1, 1), CPU)):
        log.append(("work", number))
    expected = [[("wait", i % 2), ("fill", i % 2), ("work", i), ("release", i % 2)] for i in range(3)]
    assert log == sum(expected, [])


def test_a_batch_stays_until_its_slot_comes_again():
    prefetcher = Prefetcher(ahead=3)
    kept = [(batch.images, batch.images.clone()) for batch in prefetcher(loader(2, 2, 2), CPU)]
    assert all(torch.equal(images, copy) for images, copy in kept)
    assert len({images.data_ptr() for images, _ in kept}) == 3


def test_an_epoch_that_is_left_releases_its_slot(monkeypatch):
    released = []
    monkeypatch.setattr(Slot, "release", lambda slot: released.append(slot))
    prefetcher = Prefetcher()
    batches = prefetcher(loader(1, 1), CPU)
    next(batches)
    batches.close()
    assert released == [prefetcher.slots[0]]


def test_a_loader_learns_which_stream_reads_its_slots():
    class Loader(list):
        copy_stream = "nobody has set it"

    ring = Loader(loader(1))
    list(Prefetcher()(ring, CPU))
    assert ring.copy_stream is None


def test_to_device_on_a_cpu_is_the_tensor_itself():
    tensor = torch.ones(2)
    assert to_device(tensor, CPU) is tensor


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_on_a_gpu_slow_work_sees_its_own_batch(pinned):
    """Every step works long on its images, late; a copy that came too early would change what it sees."""
    device = torch.device("cuda")

    def big():
        for i in range(12):
            images = torch.full((8, 3, 256, 256), i, dtype=torch.uint8)
            yield (images.pin_memory() if pinned else images), torch.zeros(0, 6), (), None

    seen = []
    for batch in Prefetcher()(big(), device):
        torch.cuda._sleep(20_000_000)
        seen.append(torch.stack((batch.images.amin(), batch.images.amax())))
    assert torch.stack(seen).tolist() == [[i, i] for i in range(12)]


@pytest.mark.gpu
def test_on_a_gpu_bytes_become_the_same_numbers():
    images = torch.arange(256, dtype=torch.uint8, device="cuda").view(1, 1, 16, 16).expand(2, 3, 16, 16)
    assert torch.equal(as_float(images), images.float() / 255)
