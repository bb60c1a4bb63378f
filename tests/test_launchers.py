"""Runs under torchrun: a killed process, another number of processes, several machines."""

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch.distributed.run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train
from tests import forked, small_run
from tests.forked import Forked
from tests.rank_cases import free_port, run_ranks
from tests.test_train import ROOT, results_of
from utils.engine import resume
from utils.engine.checkpoint_reader import read_checkpoint
from utils.plots.run import read_results


def launch(errors, body, *args):
    """What torchrun --standalone --nproc_per_node 2 --max-restarts 1 does, with forks of this process."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    config = LaunchConfig(1, 1, 2, run_id="test", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                          max_restarts=1, monitor_interval=0.1, start_method="fork")  # fmt: skip
    elastic_launch(config, body)(*args)


def train_and_die_once(line):
    """train.py --resume, but its second process is killed in epoch 2, once, when the checkpoint of epoch 1 is there."""
    train_one_epoch, last = train.train_one_epoch, Path(line[1])
    begun = last.stat().st_mtime_ns

    def killed_in_epoch_2(epoch, *others):
        if epoch == 2 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            while last.stat().st_mtime_ns == begun:  # the first process writes it
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return train_one_epoch(epoch, *others)

    train.train_one_epoch = killed_in_epoch_2
    small_run.leave("train", line)


def test_a_killed_process_and_another_number_of_processes(tmp_path, caplog):
    """One process begins, two resume, one of them is killed, both go on; in the end there is one again."""
    flags = ("--batch-size", "4", "--test-batch-size", "2", "--epochs", "1")
    begun = small_run.run(tmp_path, *flags, num_images=8)
    run = tmp_path / "runs" / "copy"  # the first one belongs to this process
    shutil.copytree(begun, run, ignore=shutil.ignore_patterns(".lock"))
    last = run / "weights" / "last.pt"
    line = ["--resume", str(last), "--epochs", "4", "--fast-val", "--device", "cpu"]
    done = forked.run(tmp_path, launch, tmp_path / "errors.txt", train_and_die_once, line)
    assert done.status == 0, done.text + (tmp_path / "errors.txt").read_text()[-2000:]
    said = done.text.splitlines()
    assert said.count(f"Started again by torchrun: the run goes on from {last}") == 1
    assert sum("the checkpoint has those of 1 process, this run has 2" in text for text in said) == 1
    assert not [text for text in said if "WARNING" in text or "process 1:" in text]
    assert {path.name for path in run.parent.iterdir()} == {"run", "copy"}
    assert read_results(run / "results.txt")[:, 0].tolist() == [0, 1, 2, 3]
    assert len(resume.of(read_checkpoint(run / "weights" / "last_full.pt"))["random_states"]) == 2
    before = [line.split()[1:] for line in results_of(run).splitlines()]
    with caplog.at_level("INFO"):
        small_run.run_line(["--resume", str(last), "--epochs", "5", "--device", "cpu", "--no-fast-val"])
    assert "the checkpoint has those of 2 processes, this run has 1" in caplog.text
    assert "total_batch_size" not in caplog.text, "the batch of all processes together stays"
    after = [line.split()[1:] for line in results_of(run).splitlines()]
    assert len(after) == 5 and after[:4] == before


def train_shared_and_alone(line, rank):
    for flags in (("--name", "alone"), ("--name", "shared", "--fast-val")):
        with small_run.group_kept():
            assert small_run.program("train", [*line, *flags]) == 0


def test_shared_validation_changes_no_digit(tmp_path):
    line = small_run.arguments(tmp_path, "--batch-size", "4", "--test-batch-size", "2", num_images=9)
    for ended in run_ranks(partial(train_shared_and_alone, line), tmp_path):
        assert ended.status == 0, ended.text
    runs = [tmp_path / "runs" / name for name in ("alone", "shared")]
    assert results_of(runs[0]) == results_of(runs[1])


# ---- several machines ----------------------------------------------------------------------------------------------

ON_A_MACHINE = ["--data", "data.yaml", "--cfg", "cfg.yaml", "--hyp", "hyp.yaml", "--img", "64", "--batch-size", "4",
                "--epochs", "1", "--device", "cpu", "--workers", "0", "--noautoanchor", "--fast-val"]  # fmt: skip


@pytest.fixture
def machines(tmp_path):
    """`machines(*numbers of images)`: a folder for each machine, with data of its own."""

    def make(*nums_images):
        folders = [tmp_path / f"machine{number}" for number in range(len(nums_images))]
        for folder, num_images in zip(folders, nums_images, strict=True):
            folder.mkdir()
            small_run.arguments(folder, num_images=num_images)
        return folders

    return make


def launch_there(folder, number, port):
    os.chdir(folder)
    place = f"--nnodes 2 --nproc_per_node 1 --node_rank {number} --master_addr 127.0.0.1 --master_port {port}"
    torch.distributed.run.main([*place.split(), str(ROOT / "train.py"), *ON_A_MACHINE])


@pytest.mark.slow
def test_two_machines_with_disks_of_their_own(machines):
    """A launcher on each, as it is started by hand; one of the two programs draws."""
    folders, port = machines(8, 8), free_port()
    launchers = [Forked(folder / "output.txt", launch_there, folder, number, port)
                 for number, folder in enumerate(folders)]  # fmt: skip
    for launcher in launchers:
        ended = launcher.end(timeout=300)
        assert ended.status == 0, ended.text[-2000:]
    first, second = folders
    run = first / "runs" / "train" / "exp"
    results = read_results(run / "results.txt")
    assert results[:, 0].tolist() == [0] and np.isfinite(results).all()
    assert (run / "weights" / "best.pt").is_file() and (run / "confusion_matrix.png").is_file()
    new = {path.name for path in second.rglob("*.cache")}
    assert len(new) == 2 and not (second / "runs").exists(), "caches, and nothing else"


def train_there(folders, rank):
    os.chdir(folders[rank])
    os.environ["LOCAL_RANK"] = "0"
    small_run.leave("train", ON_A_MACHINE)


def train_on(folders, tmp_path):
    """What the processes of two machines say."""
    ended = run_ranks(partial(train_there, folders), tmp_path)
    assert [process.status for process in ended] == [2, 2]
    return "".join(process.text for process in ended)


def without_an_image(split, folder):
    next((folder / "images" / split).iterdir()).unlink()


def without_a_box(folder):
    next((folder / "labels" / "train").iterdir()).write_text("")


def with_text(name, before, after, folder):
    text = (folder / name).read_text()
    assert before in text
    (folder / name).write_text(text.replace(before, after))


OTHERS = {
    "classes": partial(with_text, "data.yaml", "[red, green]", "[green, red]"),
    "hyper-parameters": partial(with_text, "hyp.yaml", "box: 0.05", "box: 0.06"),
    "model": partial(with_text, "cfg.yaml", "- 8\n    - 3", "- 16\n    - 3"),
    "labels": without_a_box,
    "validation images": partial(without_an_image, "val"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_two_machines_with_other_files(what, machines, tmp_path):
    folders = machines(6, 6)
    OTHERS[what](folders[1])
    assert f"error: rank 1 does not have the {what} of rank 0" in train_on(folders, tmp_path)


def test_two_machines_with_other_images(machines, tmp_path):
    folders = machines(8, 8)
    without_an_image("train", folders[1])
    assert "rank 0 trains on 8 images, rank 1 on 7; they are not the same" in train_on(folders, tmp_path)
