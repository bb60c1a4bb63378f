"""Look at a machine before training on it: what will be slow, what is impossible, and what to do about it.

    python tools/doctor.py [--folder .]        or: make doctor

Prints a table and the rates to expect, by the model of tools/roofline.py and the CPU time of an image: predicted, not
measured. Nothing is trained and nothing is written. The exit status is 1 if something makes training impossible.
"""

import argparse
import importlib
import logging
import math
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import roofline
from utils.run import entry
from utils.system.compilers import ADVICE, c_compiler, has_headers
from utils.system.cores import usable_cores
from utils.system.files import check_can_be_made, folded, printable
from utils.system.memory import SHARED_MEMORY, available_memory, describe_bytes

OK, SLOW, WRONG = "ok", "slow", "WRONG"
GB = 10**9
SAMPLE_MS = {320: 1.6, 640: 6.2}  # CPU time of a training image by its side, the GPU finishing it (--fast)
# The same where it only draws (--cache-images gpu), by tools/bench_composing.py; 640 by the ratio on another machine
DRAWN_MS = {320: 0.4, 640: 0.8}
COCO_IMAGES = 118_287
CACHE_BYTES = {320: 27 * GB, 640: 108 * GB}  # of COCO in memory, or on the card (--cache-images)
DISK_BYTES = 60 * GB  # COCO, coco320 and the caches
TESTED = {"torch": ("2.4", "2.14"), "numpy": ("1.24", "2.4"), "cv2": ("4.8", "5.0")}  # oldest and newest version
WIDTH = 79  # columns of what is printed
PIN_BYTES = 256 * 10**6  # more than three batches of 64 images at 640 px


class Row(NamedTuple):
    thing: str
    found: str
    verdict: str = OK
    advice: str = ""


def judge_driver(torch_cuda, driver_cuda, driver, works):
    """`torch_cuda` "13.0" or None, `driver_cuda` (13, 0) or None, the `driver`'s version, whether a GPU `works`."""
    thing, built = "GPU and driver", f"torch for CUDA {torch_cuda}" if torch_cuda else "torch without CUDA"
    if driver_cuda is None:
        return Row(thing, f"none, {built}", SLOW, "training runs on the CPU, a hundred times slower or more: good for "
                   "trying things; to train, rent a machine with an NVIDIA GPU")  # fmt: skip
    found = f"driver {driver} (CUDA {'.'.join(map(str, driver_cuda))}), {built}"
    if torch_cuda is None:
        return Row(thing, found, WRONG, "this torch knows no GPU: pip install --force-reinstall torch torchvision")
    if int(torch_cuda.split(".")[0]) > driver_cuda[0]:
        return Row(thing, found, WRONG, f"the driver is too old: rent a machine with cuda_max_good>={torch_cuda}, or "
                   f"install a build for an older CUDA, see VAST_SETUP.md")  # fmt: skip
    if not works:
        return Row(thing, found, WRONG, "torch finds no GPU: does CUDA_VISIBLE_DEVICES hide it? was the container "
                   "started with --gpus all?")  # fmt: skip
    return Row(thing, found)


def judge_architecture(name, capability, built_for):
    """`capability` (12, 0) of a GPU; `built_for` ["sm_75", ..., "compute_90"], what torch has kernels for."""
    major, minor = capability
    kernels = [int(text.removeprefix("sm_").rstrip("af")) for text in built_for if text.startswith("sm_")]
    found = f"{name}, sm_{major}{minor}; torch has {', '.join(built_for)}"
    if any(number // 10 == major and number % 10 <= minor for number in kernels):
        return Row("architecture", found)
    sources = [int(text.removeprefix("compute_").rstrip("af")) for text in built_for if text.startswith("compute_")]
    if any(number <= 10 * major + minor for number in sources):
        return Row("architecture", found, SLOW, "the first start compiles kernels for minutes: install a newer torch")
    return Row("architecture", found, WRONG, "this torch has no kernels for this GPU: install another version of torch")


def judge_gpu_memory(free, total):
    """Bytes."""
    found = f"{describe_bytes(free)} of {describe_bytes(total)} free"
    if free < 0.8 * total:
        return Row("GPU memory", found, SLOW, "another program uses the GPU (nvidia-smi names it): end it")
    if total < 12 * GB:
        return Row("GPU memory", found, SLOW, "small: --batch-size -1 finds the largest batch that fits")
    fits = _fitting(0.6 * free)  # training takes the rest
    return Row("GPU memory", found, OK, f"--cache-images gpu: COCO fits on it at {fits} px" if fits else "")


def judge_cores(usable, of_machine):
    found = f"{usable} of {of_machine}"
    if usable < 4:
        return Row("CPU cores", found, SLOW, f"too few to feed a GPU: --workers {usable} --cache-images gpu, or rent "
                   "16 cores")  # fmt: skip
    return Row("CPU cores", found, OK, f"--workers {min(usable, 16)}")


def judge_memory(available):
    """Bytes that this container can have, None where that is unknown."""
    if available is None:
        return Row("memory", "unknown")
    found = f"{describe_bytes(available)} available"
    if available < 4 * GB:
        return Row("memory", found, SLOW, "workers may be killed: at most --workers 2, no --cache-images")
    fits = _fitting(available / 1.2)
    advice = f"--cache-images: COCO fits at {fits} px"
    if not fits:
        advice = "enough to train; to keep the images of COCO at hand, --cache-images disk (a file)"
    return Row("memory", found, OK, advice)


def _fitting(num_bytes):
    """The sides at which COCO's images fit into so much, as text."""
    return " and ".join(str(side) for side, size in CACHE_BYTES.items() if num_bytes > size)


def judge_shared_memory(size):
    """Bytes of /dev/shm in all; None where there is none."""
    found = "none" if size is None else describe_bytes(size)
    if size is None or size < 4 * GB:
        return Row(str(SHARED_MEMORY), found, SLOW, "the loader of a run without flags may die of it: --fast and "
                   "--worker-tensor need none; or start the container with --shm-size=16g")  # fmt: skip
    return Row(str(SHARED_MEMORY), found)


def judge_disk(free, folder):
    """Bytes."""
    found = f"{describe_bytes(free)} free in {folder}"
    if free < GB:
        return Row("disk", found, WRONG, "checkpoints and logs cannot be written: make room")
    if free < DISK_BYTES:
        return Row("disk", found, SLOW, f"enough for a small set; COCO with its caches takes {DISK_BYTES // GB} GB")
    return Row("disk", found)


def judge_pinned(limit, pinned):
    """`limit` of ulimit -l in bytes, None for none; `pinned`: whether CUDA gave some, None without a GPU."""
    found = "no limit" if limit is None else f"ulimit -l {describe_bytes(limit)}"
    if pinned is None:
        return Row("page-locked memory", f"{found}; not tried without a GPU")
    if not pinned:
        return Row("page-locked memory", f"{found}; CUDA got none", SLOW, "copies to the GPU wait for each other: "
                   "start the container with --ulimit memlock=-1")  # fmt: skip
    return Row("page-locked memory", f"{found}; CUDA got {describe_bytes(PIN_BYTES)}")


def judge_compiler(triton, compiler, headers, has_gpu):
    """Version of Triton and path of a C compiler, None without; whether Python's C headers are there."""
    there = {"Triton": triton, "a C compiler": compiler, "Python.h": headers}
    missing = ", ".join(name for name, found in there.items() if not found)
    found = f"Triton {triton or 'not installed'}, {compiler or 'no compiler'}" + " without Python.h" * (not headers)
    if not missing or not has_gpu:
        return Row("Triton and compiler", found, OK, "" if has_gpu else "needed with a GPU only")
    return Row("Triton and compiler", found, SLOW, f"without {missing} --fast cannot use kernels of its own: {ADVICE}")


def judge_version(module, version):
    """`version` of a module of TESTED, None if it cannot be imported."""
    low, high = TESTED[module]
    found = f"{version or 'cannot be imported'}; tested {low} to {high}"
    number = [int(part) for part in version.split(".")[:2]] if version else []
    if number < list(map(int, low.split("."))):
        return Row(module, found, WRONG, "pip install -r requirements.txt")
    if number > list(map(int, high.split("."))):
        return Row(module, found, OK, "newer than tested: make smoke tells whether it works")
    return Row(module, found)


def expected_rates(gpu_name, cores):
    """The table of rates, row by row, for a GPU called `gpu_name` (None without one) and a number of cores.

    The workers make the samples. The last column says how many cores keep the GPU busy, in brackets how many if the
    workers only draw them.
    """
    gpu = next((key for key in roofline.GPUS if gpu_name and key in gpu_name), None)
    yield "job", "GPU img/s", "cores img/s", "time", "limit", "needed"
    for model, side, batch in roofline.MEASURED["planned"]:
        job, by_cores = f"{model} {side} px batch {batch}", cores * 1000 / SAMPLE_MS[side]
        if gpu is None:
            yield job, "unknown" if gpu_name else "no GPU", f"{by_cores:.0f}", *["unknown"] * 3
            continue
        by_gpu = roofline.rate(f"cfg/training/{model}.yaml", side, batch, "planned", gpu)
        hours = 100 * COCO_IMAGES / min(by_gpu, by_cores) / 3600
        needed, fewer = (math.ceil(by_gpu * times[side] / 1000) for times in (SAMPLE_MS, DRAWN_MS))
        limit = "GPU" if cores >= needed else "cores"
        yield job, f"{by_gpu:.0f}", f"{by_cores:.0f}", f"{hours:.1f} h", limit, f"{needed} ({fewer})"


def aligned(rows):
    """Lines of a table of texts, every column as wide as it has to be."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def described(row):
    """Lines about a Row: the verdict, what was found, below it what to do."""
    yield folded(f"{row.verdict:5}  {row.thing:19}  {row.found}", WIDTH, 28)
    if row.advice:
        yield folded(f"{'':7}-> {row.advice}", WIDTH, 10)


def driver_versions():
    """((major, minor) of the CUDA that the driver knows, version of the driver); (None, "") without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        cuda, driver = pynvml.nvmlSystemGetCudaDriverVersion(), pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # no package, no library, no driver, no card: all mean the same here
        return None, ""
    return (cuda // 1000, cuda % 1000 // 10), driver


def can_pin():
    try:
        return torch.empty(PIN_BYTES, dtype=torch.uint8, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


def version_of(module):
    """None if it cannot be imported."""
    try:
        return importlib.import_module(module).__version__
    except ImportError:
        return None


def examine(folder):
    """[Row] about this machine, a run writing to `folder`."""
    has_gpu = torch.cuda.is_available()
    cuda, driver = driver_versions()
    rows = [judge_driver(torch.version.cuda, cuda, driver, has_gpu)]
    if has_gpu:
        rows += [judge_architecture(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0),
                                    torch.cuda.get_arch_list()),
                 judge_gpu_memory(*torch.cuda.mem_get_info(0))]  # fmt: skip
    shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return [
        *rows,
        judge_cores(usable_cores(), os.cpu_count()),
        judge_memory(available_memory()),
        judge_shared_memory(shared),
        judge_disk(shutil.disk_usage(folder).free, printable(folder)),
        judge_pinned(None if limit == resource.RLIM_INFINITY else limit, can_pin() if has_gpu else None),
        judge_compiler(version_of("triton"), c_compiler(), has_headers(), has_gpu),
        *(judge_version(module, version_of(module)) for module in TESTED),
    ]


def main(opt):
    if Path(opt.folder).exists():
        check_can_be_made(opt.folder, "--folder")
    rows = examine(opt.folder)
    for row in rows:
        print(*described(row), sep="\n")
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    print("\nTraining with --fast, predicted, not measured; time of 100 epochs of COCO:\n")
    print(*aligned(expected_rates(gpu, usable_cores())), sep="\n")
    print("needed: cores that keep the GPU busy; in brackets: with --cache-images gpu\n")
    impossible = [row.thing for row in rows if row.verdict == WRONG]
    print(f"Training is not possible: {', '.join(impossible)}." if impossible else "Training is possible.")
    sys.exit(1 if impossible else 0)


if __name__ == "__main__":
    logging.getLogger("models").setLevel(logging.WARNING)  # not the table of layers
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=entry.Help)
    parser.add_argument("--folder", default=".", help="where runs are written (default: the working directory)")
    entry.run(main, parser.parse_args())
