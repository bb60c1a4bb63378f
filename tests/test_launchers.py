"""Runs under torchrun: a killed process, another number of processes, several machines."""

import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import small_run
from tests.test_train import CPU_ONLY, ROOT, TWO_PROCESSES, program, results_of
from utils.engine import resume
from utils.engine.checkpoint_reader import read_checkpoint
from utils.plots.run import read_results

# train.py, but its second process is killed in the middle of epoch 2, once.
KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
import train
from tests import small_run

train_one_epoch = train.train_one_epoch

def killed_in_epoch_2(epoch, *others):
    if epoch == 2 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return train_one_epoch(epoch, *others)

train.train_one_epoch = killed_in_epoch_2
with small_run.drawing(pictures=False):
    train.entry.run(train.main, train.train_parser().parse_args())
"""


def test_a_killed_process_and_another_number_of_processes(tmp_path, caplog):
    """One process begins, two resume, one of them is killed, both go on; in the end there is one again."""
    flags = ("--batch-size", "4", "--test-batch-size", "2", "--epochs", "1")
    begun = small_run.run(tmp_path, *flags, num_images=8)
    run = tmp_path / "runs" / "copy"  # the first one belongs to this process
    shutil.copytree(begun, run, ignore=shutil.ignore_patterns(".lock"))
    last = run / "weights" / "last.pt"
    (tmp_path / "killed.py").write_text(KILLED.format(root=str(ROOT)))
    line = ("--max-restarts", "1", "killed.py", "--resume", str(last), "--epochs", "4", "--fast-val")
    done = program(*line, cwd=tmp_path, launcher=TWO_PROCESSES)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    said = done.stdout.splitlines()
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


@pytest.mark.slow
def test_shared_validation_changes_no_digit(tmp_path):
    for flags in (("--name", "alone"), ("--name", "shared", "--fast-val")):
        line = small_run.arguments(tmp_path, "--batch-size", "4", "--test-batch-size", "2", *flags, num_images=9)
        done = program(str(ROOT / "train.py"), *line, cwd=tmp_path, launcher=TWO_PROCESSES)
        assert done.returncode == 0, done.stderr[-2000:]
    runs = [tmp_path / "runs" / name for name in ("alone", "shared")]
    assert results_of(runs[0]) == results_of(runs[1])
    assert all((run / "confusion_matrix.png").is_file() for run in runs)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def machines(tmp_path):
    """`machines(*numbers of images)`: a launcher for each machine with a disk of its own; status and output of both."""

    def train(*nums_images):
        port, programs = free_port(), []
        for number, num_images in enumerate(nums_images):
            folder = tmp_path / f"machine{number}"
            folder.mkdir()
            small_run.arguments(folder, num_images=num_images)
            place = f"--nnodes 2 --nproc_per_node 1 --node_rank {number} --master_addr 127.0.0.1 --master_port {port}"
            line = ("--data data.yaml --cfg cfg.yaml --hyp hyp.yaml --img 64 --batch-size 4 --epochs 2 --device cpu "
                    "--workers 0 --noautoanchor --fast-val")  # fmt: skip
            words = ["-m", "torch.distributed.run", *place.split(), str(ROOT / "train.py"), *line.split()]
            programs.append(subprocess.Popen(
                [sys.executable, *words], cwd=folder, env=CPU_ONLY, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            ))  # fmt: skip
        outputs = [program.communicate(timeout=300)[0] for program in programs]
        return [(program.returncode, output) for program, output in zip(programs, outputs, strict=True)]

    return train


@pytest.mark.slow
def test_two_machines_with_disks_of_their_own(machines, tmp_path):
    for status, output in machines(8, 8):
        assert status == 0, output[-2000:]
    first, second = (tmp_path / f"machine{number}" for number in range(2))
    run = first / "runs" / "train" / "exp"
    assert read_results(run / "results.txt")[:, 0].tolist() == [0, 1]
    assert np.isfinite(read_results(run / "results.txt")).all() and (run / "weights" / "best.pt").is_file()
    new = {path.name for path in second.rglob("*.cache")}
    assert len(new) == 2 and not (second / "runs").exists(), "caches, and nothing else"


@pytest.mark.slow
def test_two_machines_with_other_images(machines):
    outputs = [output for status, output in machines(8, 6)]
    assert any("rank 0 trains on 8 images, rank 1 on 6; they are not the same" in output for output in outputs)
