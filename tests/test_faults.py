"""Machines that break: full disks and memories, places without rights, clocks, packages, two runs at once."""

import ctypes
import gc
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from models.experimental import attempt_load, rebuild
from tests import small_run
from tests.forked import Forked
from tests.tiny_model import tiny_model
from utils import datasets
from utils.data.worker_errors import LoaderError
from utils.engine import checkpoint
from utils.engine.checkpoint_reader import StoredModel, check_finite, read_checkpoint
from utils.plots import run as plots
from utils.system import files

ROOT = Path(__file__).resolve().parents[1]
CPU_ONLY = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2  # linux/prctl.h, linux/capability.h


@pytest.fixture
def small_disk():
    """A disk that takes files of at most 200 kB; what a run of `small_run` saves has 270 kB an epoch."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def shrink(num_bytes=200_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))

    yield shrink
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- disks -----------------------------------------------------------------------------------------------------------


def test_full_disk_keeps_the_checkpoint_before(tmp_path, small_disk):
    path = tmp_path / "last.pt"
    checkpoint.save({"epoch": 3}, path)
    small_disk()
    with pytest.raises(OSError, match="File too large: .*last.pt"):  # in place of torch's "unexpected pos 704 vs 598"
        checkpoint.save({"epoch": 4, "model": torch.zeros(100_000)}, path)
    assert torch.load(path, weights_only=True) == {"epoch": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"], "no temporary file is left"


def test_full_disk_ends_a_run_with_a_sentence_and_it_can_be_resumed(tmp_path, small_disk, monkeypatch, capsys):
    line = small_run.arguments(tmp_path)
    save, count = checkpoint.save, []

    def save_until_full(content, path):
        count.append(path)
        if len(count) == 3:  # after init.pt and the first epoch
            small_disk()
        save(content, path)

    monkeypatch.setattr(checkpoint, "save", save_until_full)
    assert small_run.program("train", line) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert ".pt: File too large; make room, then train.py --resume goes on" in said
    small_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    last = tmp_path / "runs/run/weights/last.pt"
    assert read_checkpoint(last).epoch == 0
    assert small_run.program("train", ["--resume", str(last)]) == 0
    assert read_checkpoint(last.with_name("last_full.pt")).epoch == 1


def fill_the_disk(path):
    raise OSError(28, "No space left on device", str(path))


def test_picture_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    plots.in_background(fill_the_disk, tmp_path / "chart.png")
    plots.wait_for_background()
    (message,) = caplog.messages
    assert "chart.png" in message and "No space left" in message and caplog.records[0].exc_info is None


def test_error_of_a_write_names_the_file_that_was_meant(tmp_path):
    with pytest.raises(OSError) as caught, files.atomic_write(tmp_path / "none" / "a.txt"):
        pass
    assert caught.value.filename == str(tmp_path / "none" / "a.txt") and caught.value.errno == 2


def obey_permissions():
    """Make the program that is started next mind file modes, even when root starts it."""
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="drops a right of Linux")
def test_places_without_the_right_to_write(tmp_path):
    """A data folder costs a warning; a project folder ends the run before it begins. There is no home folder either."""
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir(), out.mkdir()
    there = ["--project", str(out)]
    line = [*small_run.arguments(data), "--epochs", "1"]
    both = (
        f"from tests.small_run import program; print(*(program('train', line) for line in {[line, [*line, *there]]}))"
    )
    environment = CPU_ONLY | {"PATH": os.environ["PATH"], "HOME": "/none"}
    for path in (data, *data.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    done = subprocess.run([sys.executable, "-c", both], cwd=ROOT, env=environment, capture_output=True, text=True,
                          preexec_fn=obey_permissions)  # fmt: skip
    for path in (data, *data.rglob("*")):
        path.chmod(0o755)
    assert done.stdout.endswith("\n2 0\n") and "no run folder can be made in" in done.stderr, done.stdout + done.stderr
    assert done.stdout.count("label cache not saved (Permission denied), the next run scans again") == 2
    assert (out / "run" / "weights" / "last.pt").is_file()


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_too_small_shared_memory_is_said_by_the_reference_loader_too(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(64e6, 64e6, 0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    small_run.make_data(tmp_path)
    opt = type("Options", (), {"single_cls": False})
    loader, _ = datasets.create_dataloader(str(tmp_path / "images/train"), 64, 3, 32, opt, workers=2)
    del loader
    gc.collect()  # ends its workers
    assert "GB of /dev/shm, and 0.0 GB are free" in caplog.text and "--shm-size" in caplog.text


class Silent(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(60)


def test_a_loader_that_stays_silent_ends_with_advice(monkeypatch, capsys):
    """As it does when its workers find /dev/shm full: torch reports that, and waits."""

    def main(opt):
        list(DataLoader(Silent(), num_workers=1, timeout=1))

    monkeypatch.setattr(logging.root, "handlers", [])
    with pytest.raises(SystemExit) as end:
        small_run.entry.run(main, None)
    assert end.value.code == 2
    assert "error: DataLoader timed out after 1 seconds; is /dev/shm too small" in capsys.readouterr().err


def test_the_reference_loader_gives_up(tmp_path, monkeypatch):
    small_run.make_data(tmp_path)
    opt = type("Options", (), {"single_cls": False})
    for workers, limit in ((0, 0), (2, datasets.STUCK)):
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        loader, _ = datasets.create_dataloader(str(tmp_path / "images/train"), 64, 3, 32, opt, workers=workers)
        assert loader.timeout == limit
        del loader
        gc.collect()  # ends its workers


class Unsendable(torch.utils.data.Dataset):
    """Its samples cannot leave the worker, as when /dev/shm is full."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self

    def __reduce__(self):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")


def test_a_worker_that_cannot_pass_a_batch_on_ends(tmp_path, monkeypatch, capfd):
    """torch's own worker drops such a batch, and the main process waits for it."""
    small_run.make_data(tmp_path)
    opt = type("Options", (), {"single_cls": False})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(datasets, "collate_fn", lambda samples: Unsendable())
    for fast in ({}, {"prefetch_factor": 1}):  # the reference, and torch's loader with options
        loader, _ = datasets.create_dataloader(str(tmp_path / "images/train"), 64, 3, 32, opt, workers=2, **fast)
        with pytest.raises((RuntimeError, LoaderError), match="DataLoader worker .* exited unexpectedly") as caught:
            next(iter(loader))
        assert "cannot pass on a batch: RuntimeError: unable to allocate shared memory(shm)" in capfd.readouterr().err
        del loader, caught
        gc.collect()  # ends its workers


@pytest.mark.parametrize("where", ["train.build_model", "utils.data.dataset.load_image"])
def test_full_memory_is_a_sentence(where, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(where, fail)
    assert small_run.program("train", small_run.arguments(tmp_path, hyp={"mosaic": 0.0})) == 2
    assert "error: the main memory is full: fewer --workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "status"), [("unspecified launch failure", 2), ("GPU is lost", 2), ("invalid argument", None)]
)
def test_a_lost_gpu_is_a_sentence_and_a_bug_is_a_traceback(fault, status, tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise RuntimeError(f"CUDA error: {fault}\nCUDA kernel errors might be reported later")

    monkeypatch.setattr("train.build_model", fail)
    if status is None:
        with pytest.raises(RuntimeError, match="invalid argument"):
            small_run.program("train", small_run.arguments(tmp_path))
    else:
        assert small_run.program("train", small_run.arguments(tmp_path)) == status
        assert f"error: CUDA error: {fault}; the GPU failed, train.py --resume" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_killed_worker_of_torch_is_reported_with_its_picture(number, tmp_path, monkeypatch):
    """What the system does to a worker when memory (SIGKILL) or /dev/shm (SIGBUS) is full."""
    small_run.make_data(tmp_path)
    sample = datasets.LoadImagesAndLabels.__getitem__

    def sample_or_die(dataset, index):
        return os.kill(os.getpid(), number) if index == 4 else sample(dataset, index)

    monkeypatch.setattr(datasets.LoadImagesAndLabels, "__getitem__", sample_or_die)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    opt = type("Options", (), {"single_cls": False})
    loader, _ = datasets.create_dataloader(str(tmp_path / "images/train"), 64, 3, 32, opt, workers=2, prefetch_factor=1)
    with pytest.raises(LoaderError, match=r"DataLoader worker \(pid.* Its workers were at .*04.png") as caught:
        list(loader)
    assert "\n" not in str(caught.value)
    del loader, caught
    gc.collect()


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_nan_in_weights_is_refused_by_every_entry(tmp_path, capsys):
    model = tiny_model()
    model.model[1].conv.weight.data[0] = float("nan")
    path = tmp_path / "nan.pt"
    torch.save({"model": model}, path)
    with pytest.raises(ValueError, match="nan.pt holds NaN or infinite numbers in model.1.conv.weight"):
        attempt_load(str(path))
    assert small_run.program("train", [*small_run.arguments(tmp_path), "--weights", str(path)]) == 2
    assert "nan.pt holds NaN" in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_which_numbers_are_harmful():
    state = {"model.0.bn.running_var": torch.tensor([np.inf, 1]), "model.0.conv.weight": torch.ones(2)}
    check_finite(StoredModel(state), "a.pt")
    for name, value in (("model.0.bn.running_var", np.nan), ("model.0.conv.weight", np.inf)):
        with pytest.raises(ValueError, match=f"a.pt holds NaN or infinite numbers in {name}"):
            check_finite(StoredModel(state | {name: torch.tensor([value])}), "a.pt")


def test_loss_that_becomes_nan_is_said_once_and_the_run_ends_in_order(tmp_path, capsys):
    line = small_run.arguments(
        tmp_path, "--epochs", "3", hyp={"lr0": 1e30, "warmup_epochs": 0.0, "warmup_min_iters": 0}
    )
    assert small_run.program("train", line) == 0
    out = capsys.readouterr().out
    assert out.count("the weights are lost; start again from an earlier checkpoint with a smaller lr0") == 1
    with pytest.raises(ValueError, match="holds NaN or infinite numbers"):
        attempt_load(str(tmp_path / "runs/run/weights/last.pt"))
    assert rebuild(read_checkpoint(tmp_path / "runs/run/weights/last.pt").for_inference()), "still a file to look into"


# ---- the system ------------------------------------------------------------------------------------------------------


def test_clock_that_goes_backwards(tmp_path, monkeypatch, capsys):
    started, calls = time.time(), []

    def backwards():
        calls.append(None)
        return started - 3600 * len(calls)

    monkeypatch.setattr(time, "time", backwards)
    assert small_run.program("train", small_run.arguments(tmp_path)) == 0
    assert re.search(r"at epoch \d of 0-1, \d\d?\.\d s, ", capsys.readouterr().out) and calls


def test_broken_tensorboard_is_one_warning(tmp_path, monkeypatch, capsys):
    """Not missing: an installation that does not fit its other packages."""

    class Broken:
        def __getattr__(self, name):
            raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Broken())
    assert small_run.program("train", small_run.arguments(tmp_path, "--epochs", "1")) == 0
    out = capsys.readouterr().out
    assert out.count("tensorboard cannot be used (Descriptors cannot be created directly)") == 1
    assert not list(tmp_path.rglob("events.*"))


@pytest.mark.slow
def test_locale_c_without_a_display_and_two_runs_at_once(tmp_path):
    """Both in one project, on data with names beyond ASCII; one of them draws, in a locale that knows no such name."""
    line = small_run.arguments(tmp_path, "--epochs", "1", "--name", "é")
    data = yaml.safe_load((tmp_path / "data.yaml").read_text())
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(data | {"names": ["名", "é"]}, allow_unicode=True), "utf-8")
    environment = CPU_ONLY | {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
                              "MPLBACKEND": "TkAgg"}  # fmt: skip
    drawing = subprocess.Popen([sys.executable, "train.py", *line], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)  # fmt: skip
    other = Forked(tmp_path / "output.txt", small_run.leave, "train", line)
    out, _ = drawing.communicate(timeout=300)
    assert drawing.returncode == 0 and b"Traceback" not in out, out.decode("utf-8", "replace")
    assert rb"\u540d" in out, "a letter that the terminal lacks is shown as its number"
    assert other.end().status == 0, other.output.read_text()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["é", "é2"]
    for name in ("é", "é2"):
        folder = tmp_path / "runs" / name
        assert len((folder / "results.txt").read_text().splitlines()) == 1
        assert (folder / "weights/last.pt").is_file()
    assert len(list(tmp_path.rglob("results.png"))) == 1
