"""Files and names that mean harm, through every entry that a user has: nothing of them is run."""

import logging
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from models.experimental import attempt_load
from tests import small_run
from tests.engine.hostile_checkpoints import HOSTILE
from tests.engine.test_checkpoint_reader_refused import ATTACKS, touch
from tests.engine.test_file_kind import LFS
from tests.label_sets import BOX, make_dataset
from tests.tiny_model import tiny_model
from utils.config.options import train_parser
from utils.data.labels.scan import scan_dataset
from utils.run import entry

REFUSED = "was refused, nothing of it was run"


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def train_from(path, folder):
    return small_run.program("train", [*small_run.arguments(folder), "--weights", str(path)])


def score(path, folder):
    line = ["--weights", str(path), "--data", str(small_run.make_data(folder)), "--img", "64", "--device", "cpu"]
    return small_run.program("test", [*line, "--project", str(folder / "runs"), "--name", "run"])


def resume(path, folder):
    run = folder / "old"
    (run / "weights").mkdir(parents=True)
    options = vars(train_parser().parse_args(small_run.arguments(folder)))
    (run / "opt.yaml").write_text(yaml.safe_dump(options))
    path = path.rename(run / "weights" / "last.pt")
    return small_run.program("train", ["--resume", str(path)])


def load_alone(path, folder):
    def main(opt):
        attempt_load(str(path))

    with pytest.raises(SystemExit) as end:
        entry.run(main, None)
    return end.value.code


ENTRIES = {
    "train --weights": train_from, "test --weights": score, "train --resume": resume, "attempt_load": load_alone,
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_checkpoints_with_code(attack, entry, tmp_path, capsys):
    """That each attack does its work when it is let, tests/engine/test_checkpoint_reader_refused.py shows."""
    canary, path = tmp_path / "canary", tmp_path / "evil.pt"
    torch.save(attack(canary), path)
    assert entry(path, tmp_path) == 2
    assert REFUSED in capsys.readouterr().err
    assert not canary.exists() and not (tmp_path / "runs" / "run").exists()


OTHER_FILES = {
    "Git LFS pointer": (lambda: LFS, "is a Git LFS pointer, not the weights: fetch them with git lfs pull"),
    "web page": (lambda: b"<!DOCTYPE html><html>", "is a web page (HTML): the download failed"),
    "ONNX": (lambda: b"\x08\x07\x12\x07pytorch", "is an ONNX model"),
    "cut off": (lambda: HOSTILE["sparse"](None)[:-30], "is cut off: the end of the archive is missing"),
    "graph": (lambda: HOSTILE["graph of layers"](random.Random(0)), "stands for far more than it has"),
    "stride 0": (lambda: HOSTILE["stride 0"](random.Random(0)), "stands for far more than it has"),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("kind", OTHER_FILES)
def test_weights_that_are_none(kind, entry, tmp_path, capsys):
    content, message = OTHER_FILES[kind]
    path = tmp_path / "other.pt"
    path.write_bytes(content())
    assert entry(path, tmp_path) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert message in said and (".pt" in said) and not (tmp_path / "runs" / "run").exists()


# ---- label caches ----------------------------------------------------------------------------------------------------


def npz_with(content):
    def write(path, payload):
        objects = np.empty(1, dtype=object)
        objects[0] = payload
        with path.open("wb") as file:
            np.savez(file, **{content: objects})

    return write


CACHES = {
    "pickle": lambda path, payload: path.write_bytes(pickle.dumps(payload)),
    "torch.save": lambda path, payload: torch.save({"hash": payload, "version": 0.1}, path),
    "npy": lambda path, payload: np.save(path.open("wb"), np.array([payload], dtype=object), allow_pickle=True),
    "objects in the signature": npz_with("signature"),
    "objects in the labels": npz_with("labels"),
}


@pytest.mark.parametrize("write", CACHES.values(), ids=CACHES)
def test_label_caches_with_code(write, tmp_path, caplog):
    canary, folder = tmp_path / "canary", make_dataset(tmp_path, {"a": BOX})
    scan_dataset(folder)
    (cache,) = tmp_path.rglob("*.cache")
    for name in (cache, cache.with_name("train.cache")):  # ours, and the name that stock YOLOv7 gives its own
        write(name, touch(canary))
    scanned = scan_dataset(folder)
    assert scanned.labels[0].tolist() == np.float32([[0, 0.5, 0.5, 0.4, 0.4]]).tolist()
    assert not canary.exists()
    assert "not a usable label cache" in caplog.text


# ---- yaml ------------------------------------------------------------------------------------------------------------

TAGS = [
    "!!python/object/apply:os.system ['touch canary']",
    "!!python/object/new:os.system ['touch canary']",
    "!!python/name:os.system",
    "!!python/module:canary",
    "!!python/object/apply:subprocess.Popen [[touch, canary]]",
]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("file", ["data.yaml", "hyp.yaml", "cfg.yaml"])
def test_yaml_with_code(file, tag, tmp_path, capsys):
    line = small_run.arguments(tmp_path)
    path = tmp_path / file
    path.write_text(path.read_text() + f"\nextra: {tag}\n")
    assert small_run.program("train", line) == 2
    assert file in capsys.readouterr().err
    assert not (tmp_path / "canary").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["touch canary", "bash -c 'touch canary'", "import os; os.system('touch canary')"])
def test_download_is_never_run(command, tmp_path, capsys):
    line = small_run.arguments(tmp_path)
    (tmp_path / "data.yaml").write_text(
        yaml.safe_dump({"train": "none/train", "val": "none/val", "nc": 2, "names": ["a", "b"], "download": command})
    )
    assert small_run.program("train", line) == 2
    assert "never run here" in capsys.readouterr().err and not (tmp_path / "canary").exists()


# ---- names -----------------------------------------------------------------------------------------------------------

NAMES = [
    "a b", "it's", 'say "x"', "$(touch canary)", "`touch canary`", "a;touch canary;", "| touch canary", "名é", "%s{0}",
    "new\nline", "-rf", "*", "\\n", "#1", "~", "a&b",
]  # fmt: skip


def test_names_are_only_names(tmp_path):
    """Every odd name as a folder of the data set and as a picture in it; one as project, run and class."""
    folder = tmp_path / "it's $(touch canary) 名\n;"
    folder.mkdir()
    line = small_run.arguments(folder, "--nosave", "--epochs", "1", "--name", "`touch canary` ../x;\n$HOME")
    for split in ("train", "val"):
        images = folder / "images" / split
        for name in NAMES:
            for kind, suffix in (("images", ".png"), ("labels", ".txt")):
                new = folder / kind / split / name / f"{name}{suffix}"
                new.parent.mkdir(exist_ok=True)
                new.write_bytes((folder / kind / split / f"00{suffix}").read_bytes())
        assert len(scan_dataset(str(images)).img_files) == 6 + len(NAMES)
    data = yaml.safe_load((folder / "data.yaml").read_text())
    (folder / "data.yaml").write_text(yaml.safe_dump(data | {"names": ["$(touch canary)", "a/../b\n"]}))
    assert small_run.program("train", line) == 0
    run = folder / "runs" / "`touch canary` ../x;\n$HOME"
    assert run.is_dir() and (run / "weights" / "last.pt").is_file()
    line = ["--weights", str(run / "weights" / "last.pt"), "--data", str(folder / "data.yaml"), "--img", "64",
            "--device", "cpu", "--project", str(folder / "tests"), "--name", "x;touch me", "--save-txt"]  # fmt: skip
    assert small_run.program("test", line) == 0
    assert not list(tmp_path.rglob("canary")) and not Path("canary").exists()


def test_lists_name_only_files(tmp_path):
    make_dataset(tmp_path, {"a": BOX})
    hostile = ["images/train/../train/a.jpg", "$(touch canary).jpg", "| touch canary", "/dev/zero", "/etc/passwd", "\0",
               "..", "images/train/a.jpg; touch canary"]  # fmt: skip
    (tmp_path / "list.txt").write_text("\n".join(hostile))
    assert scan_dataset(tmp_path / "list.txt").img_files == [str(tmp_path / "images/train/../train/a.jpg")]
    assert not (tmp_path / "canary").exists()


def test_a_healthy_file_passes(tmp_path):
    """The same door as for the files above."""
    torch.save({"model": tiny_model()}, tmp_path / "good.pt")
    assert attempt_load(str(tmp_path / "good.pt")).names == ["0", "1"]
