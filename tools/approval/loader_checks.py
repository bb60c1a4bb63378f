"""The checks of stages 2 to 4: dataloader parameters, worker tensors, micro-batches."""

import gc
import hashlib
import io
import os
import signal
import time
import unittest
from contextlib import redirect_stderr
from functools import partial
from types import SimpleNamespace

import psutil

from tools.approval.setup import Failed, Setup, children, expect, same_results
from tools.bench_loader import in_process
from utils.config.data_yaml import load_data_yaml
from utils.config.hyp import load_hyp
from utils.data.worker_errors import LoaderError
from utils.datasets import create_dataloader

PERSISTENT, TENSOR = {"persistent_workers": True}, {"worker_tensor": True}
BOTH = PERSISTENT | TENSOR
LEAK_EPOCHS, GROWTH = 12, 0.02  # memory may grow by this share from the fourth epoch to the last
PATIENCE = 30  # seconds after which a killed worker has to be noticed


# ---- tools of these checks -------------------------------------------------------------------------------------------


def open_loader(setup: Setup, workers=0, batch=None, **flags):
    """The training loader of the setup with --seed 7; returns (loader, dataset)."""
    data = load_data_yaml(setup.data, False)
    with redirect_stderr(io.StringIO()):  # without the progress bar of the scan
        return create_dataloader(
            data.train or "", setup.img, batch or setup.batch_size, 32, SimpleNamespace(single_cls=False),
            hyp=load_hyp(setup.hyp), augment=True, workers=workers, keypoints=data.keypoints,
            **{"seed": 7} | flags,
        )  # fmt: skip


def digests(loader, epochs=2):
    """A hash of every batch: pixels, labels, names, shapes."""
    found = []
    for _ in range(epochs):
        for images, targets, paths, shapes in loader:
            content = hashlib.sha256(images.numpy().tobytes())
            content.update(targets.numpy().tobytes() + repr((images.shape, paths, shapes)).encode())
            found.append(content.hexdigest())
    return found


def expect_equal(setup, variants, batch=None):
    """Every variant (workers, flags) gives the batches of the loader without workers and flags, but with --seed."""
    reference = digests(open_loader(setup, 0, batch)[0])
    for workers, flags in variants:
        found = digests(open_loader(setup, workers, batch, **flags)[0])
        expect(found == reference, f"{workers} workers, {flags}: other batches than without flags")
        gc.collect()  # ends the workers
    return f"{len(reference)} batches of two epochs bit-equal in {len(variants)} variants"


def expect_nothing_left(before):
    """The workers of a loader that is gone have ended; `before` are the processes that were there before it."""
    gc.collect()
    deadline = time.monotonic() + 10
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    expect(not children() - before, "workers were left behind")


def loader_error(*epochs):
    """What a loader says whose worker does not work any more, when it is read for these epochs."""
    try:
        for batches in epochs:
            list(batches)
    except LoaderError as error:
        return str(error)
    raise Failed("the loader did not notice that a worker does nothing any more")


def measure_loaders(setup, variants):
    """Speed of loaders that run in turns, each in a process of its own: numbers for the report; {name: numbers}."""
    _, dataset = open_loader(setup)
    found = {}
    for name, flags in variants.items():
        options = SimpleNamespace(img=setup.img, batch=setup.batch_size, workers=setup.workers, epochs=3,
                                  micro_batch_size=flags.get("micro_batch_size", 0), prefetch_factor=None)  # fmt: skip
        chosen = {key: value for key, value in flags.items() if key != "micro_batch_size"}
        found[name] = numbers = in_process(dataset, options, chosen)
        setup.measured[f"loader, {name}"] = {
            "img/s": numbers["rate"], "main process, cores": numbers["main_share"],
            "a worker, cores": numbers["worker_share"], "memory, GB": numbers["memory"],
            "first batch, s": numbers["first_batch"], "epoch gap, ms": numbers["gap"],
        }  # fmt: skip
    return found


def trains_equally(*flags):
    """A check: a run with `flags` ends with the results of the run without."""

    def check(setup: Setup):
        plain = setup.train("no flag")
        fast = setup.train(" ".join(flags), *flags)
        return same_results(plain, fast, 0.05 if plain.peak("memory_gb") else 1e-6)

    return check


# ---- stage 2 ---------------------------------------------------------------------------------------------------------


def workers_live_on(setup):
    before = children()
    loader, _ = open_loader(setup, 2, **PERSISTENT)
    seen = []
    for _ in range(3):
        digests(loader, 1)
        seen.append(children() - before)
    expect(seen[0] and seen[0] == seen[1] == seen[2], f"worker processes changed between epochs: {seen}")
    del loader
    expect_nothing_left(before)
    return f"{len(seen[0])} processes, the same in three epochs, gone with the loader"


def prefetch_reaches_the_loader(setup):
    loader, _ = open_loader(setup, 1, prefetch_factor=4)
    expect(loader.loader.prefetch_factor == 4, f"--prefetch-factor 4 became {loader.loader.prefetch_factor}")
    del loader
    expect_equal(setup, [(1, {"prefetch_factor": 4})])
    return "--prefetch-factor 4 is what the workers prepare ahead, equal batches"


def no_workers_is_one_warning(setup):
    with unittest.TestCase().assertLogs("utils.data", "WARNING") as logged:
        open_loader(setup, 0, **BOTH)
    messages = [record.getMessage() for record in logged.records]
    expect(len(messages) == 1 and "no loader workers" in messages[0], f"expected one warning, got {messages}")
    return messages[0]


def speed_of_persistent(setup):
    found = measure_loaders(setup, {"no flag": {}, "--persistent-workers": PERSISTENT})
    return ", ".join(f"{name}: {numbers['rate']:,.0f} img/s" for name, numbers in found.items())


# ---- stage 3 ---------------------------------------------------------------------------------------------------------


def buffers_are_used_again(setup):
    """A batch is a view of the ring: as many addresses as slots, however many batches."""
    loader, _ = open_loader(setup, 2, **TENSOR)
    addresses = [images.data_ptr() for _ in range(4) for images, *_ in loader]
    expect(len(set(addresses)) < len(addresses), "every batch lies at another address: it was allocated anew")
    slots = len(loader.ring.pixels)
    expect(len(set(addresses)) <= slots, f"{len(set(addresses))} addresses for {slots} buffers")
    return f"{len(addresses)} batches in {len(set(addresses))} places of a ring of {slots}"


def main_process_is_idle(setup):
    found = measure_loaders(setup, {"no flag": {}, "--worker-tensor": TENSOR, "--fast-dataloader": BOTH})
    share = found["--worker-tensor"]["main_share"]
    expect(share < 0.4, f"reading with --worker-tensor takes {share:.0%} of a core in the main process (wanted: 40 %)")
    return f"main process {share:.0%} of a core, without the flag {found['no flag']['main_share']:.0%}"


def a_killed_worker_is_said(setup):
    before = children()
    loader, _ = open_loader(setup, 2, **TENSOR)
    batches = iter(loader)
    next(batches)
    os.kill(min(children() - before), signal.SIGKILL)
    started = time.monotonic()
    message = loader_error(batches, loader, loader)
    seconds = time.monotonic() - started
    expect(seconds < PATIENCE, f"it took {seconds:.0f} s to notice a killed worker")
    del batches, loader
    expect_nothing_left(before)
    return f"after {seconds:.1f} s: {message}"


def no_leak(setup):
    loader, _ = open_loader(setup, 2, **BOTH)
    process, sizes, handles = psutil.Process(), [], []
    for _ in range(LEAK_EPOCHS):
        digests(loader, 1)
        sizes.append(process.memory_info().rss + sum(worker.memory_info().rss for worker in process.children()))
        handles.append(process.num_fds())
    growth = sizes[-1] / sizes[3] - 1
    expect(growth < GROWTH, f"memory grew by {growth:.1%} from epoch 4 to epoch {LEAK_EPOCHS}")
    expect(handles[-1] <= handles[3], f"open files grew from {handles[3]} to {handles[-1]}")
    return f"memory {growth:+.2%} from epoch 4 to {LEAK_EPOCHS}, {handles[-1]} open files throughout"


# ---- stage 4 ---------------------------------------------------------------------------------------------------------


def micro_batches_are_equal(setup):
    odd = setup.batch_size - 1 if setup.batch_size > 2 else setup.batch_size  # leaves a partial last batch
    return expect_equal(setup, [(2, TENSOR | {"micro_batch_size": size}) for size in sorted({0, 1, 3, odd})], odd)


def another_collation(setup):
    loader, _ = open_loader(setup, 1, **TENSOR)
    expect(not hasattr(loader, "collate_fn") and not hasattr(loader, "loader"), "a torch DataLoader still collates")
    return f"{type(loader).__name__}: workers write into the batch, micro-batches of {loader.micro_batch}"


def a_stuck_worker_is_said(setup):
    before = children()
    loader, _ = open_loader(setup, 1, timeout=3, **TENSOR)
    list(loader)
    stopped = children() - before
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        message = loader_error(loader, loader, loader)
    finally:
        for pid in stopped & children():
            os.kill(pid, signal.SIGCONT)
    del loader
    expect_nothing_left(before)
    return message


def first_batch_comes_early(setup):
    smallest = BOTH | {"micro_batch_size": 1}
    variants = {"no flag": {}, "--fast-dataloader": BOTH, "--fast-dataloader --micro-batch-size 1": smallest}
    found = measure_loaders(setup, variants)
    return ", ".join(f"{name}: first batch after {numbers['first_batch']:.2f} s" for name, numbers in found.items())


CHECKS = {
    2: {
        "equal batches with --persistent-workers": partial(
            expect_equal, variants=[(0, PERSISTENT), (1, {}), (2, {}), (1, PERSISTENT), (2, PERSISTENT)]
        ),
        "workers live across epochs": workers_live_on,
        "--prefetch-factor": prefetch_reaches_the_loader,
        "no workers: one warning": no_workers_is_one_warning,
        "speed of the loaders": speed_of_persistent,
        "training with --persistent-workers": trains_equally("--persistent-workers"),
    },
    3: {
        "equal batches with --worker-tensor": partial(
            expect_equal, variants=[(1, TENSOR), (1, BOTH), (2, TENSOR), (2, BOTH)]
        ),
        "batches lie in buffers that are used again": buffers_are_used_again,
        "the main process has little to do": main_process_is_idle,
        "a killed worker": a_killed_worker_is_said,
        "no leak": no_leak,
        "training with --worker-tensor": trains_equally("--worker-tensor"),
    },
    4: {
        "equal batches for every micro-batch size": micro_batches_are_equal,
        "another collation than torch's": another_collation,
        "a worker that hangs": a_stuck_worker_is_said,
        "time to the first batch": first_batch_comes_early,
        "training with --fast-dataloader": trains_equally("--fast-dataloader", "--micro-batch-size", "3"),
    },
}
