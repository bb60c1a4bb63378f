"""Broken files of every kind against everything that reads files: each must load, or be refused in words.

    python -m tests.fuzz --inputs 2000             that many of each kind; a table of what happened
    python -m tests.fuzz --kinds cfg --seed 3      one kind, other files
    python -m tests.fuzz --show crashed            the inputs behind a column

Readers run in a child process that may take MEMORY bytes. One that dies is a crash, one that is silent for longer than
PATIENCE a hang. Of checkpoints there are twice as many: injured files, then files that stand for more than any memory
holds (tests/engine/hostile_checkpoints.py), random pickles, and injured pickles in whole archives.
"""

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from models.experimental import rebuild
from models.yolo import Model
from tests import mutations
from tests.tiny_model import tiny_model
from tools.experiments import command_line
from utils.config.data_yaml import load_data_yaml
from utils.config.hyp import HYPER_PARAMETERS, load_hyp
from utils.config.options import read_options
from utils.data.labels.scan import scan_dataset
from utils.datasets import LoadImagesAndLabels
from utils.engine.checkpoint_reader import check_finite, read_checkpoint
from utils.metrics.coco import CocoResults
from utils.metrics.coco_annotations import match_categories, match_images, read_annotations

PATIENCE = 20  # seconds for one input
MEMORY = 3e9  # bytes of address space that the child may take beyond what it has
MAX_SHOWN = 40  # inputs of a kind that are described, none of them twice
OUTCOMES = ("loaded", "refused", "crashed", "hung")


# ---- what a good outcome is: each function reads the file and fails unless what it got can be used -----------------


def read_labels(file):
    scanned = scan_dataset(str(file.parent.parent / "images"))
    rows = scanned.labels[0]
    assert rows.dtype == np.float32 and rows.shape[1] == 5 and np.isfinite(rows).all()
    assert (rows[:, 1:] >= 0).all() and (rows[:, 1:] <= 1).all() and (rows[:, 0] % 1 == 0).all()
    assert not scanned.segments[0] or len(scanned.segments[0]) == len(rows)


def read_list(file):
    scanned = scan_dataset(str(file))
    assert scanned.img_files and all(Path(path).is_file() for path in scanned.img_files)


def read_data(file):
    data = load_data_yaml(str(file))
    assert data.nc == len(data.names) >= 1 and all(isinstance(name, str) for name in data.names)
    for entry in (data.train, data.val):
        assert all(Path(place).exists() for place in (entry if isinstance(entry, list) else [entry]))


def read_hyp(file):
    hyp = load_hyp(str(file))
    for key, row in HYPER_PARAMETERS.items():
        assert key not in hyp or (isinstance(hyp[key], (int, float)) and row.range.holds(hyp[key]))


def read_cfg(file):
    model = Model(str(file), nc=2)
    with torch.no_grad():
        maps = model(torch.zeros(2, model.yaml["ch"], 256, 256))
    assert all(level.shape[-1] == 7 for level in maps)


def read_cache(file):
    """Whatever the cache says, the scan tells what the disk holds."""
    scanned = scan_dataset(str(file.parent / "images"))
    assert [Path(path).name for path in scanned.img_files] == ["00.png", "01.png"]
    assert scanned.labels[0].tolist() == np.float32([[0, 0.5, 0.5, 0.2, 0.4]]).tolist()
    assert scanned.shapes.tolist() == [[24, 16], [24, 16]] and scanned.counts["total"] == 2


def read_picture(file):
    dataset = LoadImagesAndLabels(str(file.parent), 64, 1)
    try:
        image, targets, path, shapes = dataset[0]
    except ValueError as error:
        raise RuntimeError("the scan let a picture pass that cannot be read") from error
    assert image.dtype == torch.uint8 and image.shape[0] == 3 and max(image.shape[1:]) == 64


def read_pt(file):
    stored = read_checkpoint(file).for_inference()
    assert all(isinstance(value, torch.Tensor) for value in stored.state.values())
    if stored.yaml is not None:
        check_finite(stored, file)
        model = rebuild(stored, file)
        assert len(model.state_dict()) == len(stored.state)


def read_opt(file):
    assert read_options(file)[0].epochs is not None


def read_coco(file):
    """The official score of a detector that finds one object of each class."""
    images = [str(file.parent / "images" / name) for name in ("00.png", "01.png")]
    content = read_annotations(file)
    ids = match_images(images, content["images"], file)
    results = CocoResults(ids, match_categories(["red", "green"], content["categories"], file), content, file)
    for path in images:
        results.add(path, torch.tensor([[2, 2, 12, 12, 0.9, 0], [4, 4, 12, 12, 0.8, 1]]), (16, 24))
    results.write(file.with_name("predictions.json"))
    json.loads(file.with_name("predictions.json").read_text())
    try:
        scores = results.score()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    assert 0 <= scores.ap <= scores.ap50 <= 1 and not any(score < 0 for score in scores)


# ---- the kinds -----------------------------------------------------------------------------------------------------


@dataclass
class Kind:
    """Files of one kind: healthy ones {name: bytes}, where in a folder they go (None: by name), and their reader."""

    healthy: dict
    place: str | None
    read: object
    others: dict = field(default_factory=dict)  # files that lie beside, by place

    def put(self, folder, name, data):
        """Write one file, the rest of the folder being as it was."""
        file = folder / (self.place or f"images/{name}")
        if not self.place:
            shutil.rmtree(file.parent)
            file.parent.mkdir()
        file.write_bytes(data)
        return file


def texts(variants):
    return {str(i): text.encode() for i, text in enumerate(variants)}


def kinds():
    """Every kind by name."""
    image, label = mutations.encoded(".png", mutations.picture()), b"0 0.5 0.5 0.2 0.4\n"
    images = {"images/00.png": image, "images/01.png": image}
    pair = images | {"labels/00.txt": label, "labels/01.txt": label}
    return {
        "label text": Kind(texts(mutations.LABELS), "labels/00.txt", read_labels, {"images/00.png": image}),
        "list file": Kind(texts(mutations.LISTS), "images/list.txt", read_list, images),
        "data yaml": Kind(texts(mutations.DATA), "images/data.yaml", read_data, {"images/list.txt": b"", **images}),
        "hyp yaml": Kind(texts(mutations.HYPS), "hyp.yaml", read_hyp),
        "cfg yaml": Kind(texts(mutations.cfgs()), "cfg.yaml", read_cfg),
        "opt yaml": Kind(texts(mutations.OPTIONS), "opt.yaml", read_opt),
        "coco json": Kind(texts(mutations.COCOS), "coco.json", read_coco),
        "label cache": Kind({}, ".cache", read_cache, pair),
        "picture": Kind(mutations.pictures(), None, read_picture, {"images/any": b""}),
        "checkpoint": Kind({"a": stored(tiny_model()), "b": stored(tiny_model().state_dict())}, "a.pt", read_pt),
    }


def stored(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def prepare(kind, folder):
    """Lay out `folder` for a kind."""
    for place, data in kind.others.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(data)
    if kind.place:
        (folder / kind.place).parent.mkdir(parents=True, exist_ok=True)
    if kind.read is read_cache:  # the healthy file is the one that a scan leaves
        with contextlib.redirect_stderr(io.StringIO()):
            scan_dataset(str(folder / "images"))
        (cache,) = folder.rglob("*.cache")
        kind.place, kind.healthy = str(cache.relative_to(folder)), {"cache": cache.read_bytes()}


# ---- running -------------------------------------------------------------------------------------------------------


class Warnings(logging.Handler):
    """Collects the text of warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def try_one(kind, file):
    """(outcome, detail) of one file that lies ready."""
    heard = Warnings()
    logging.getLogger().addHandler(heard)
    try:
        kind.read(file)
    except ValueError as error:
        message = str(error)
        said = file.name in message or kind.place is None or any(file.name in line for line in heard.lines)
        if not said:
            return "crashed", f"the message does not name the file: {message[:300]}"
        if len(message) > 50_000:
            return "crashed", f"a message of {len(message)} characters: {message[:300]}"
        return "refused", message[:300]
    except BaseException:
        return "crashed", traceback.format_exc()[-1500:]
    finally:
        logging.getLogger().removeHandler(heard)
    return "loaded", ""


def child(kind, folder, inputs, first, pipe):
    """Try `inputs` from number `first` on and report each."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    logging.basicConfig(handlers=[logging.NullHandler()], level=logging.WARNING, force=True)
    for number in range(first, len(inputs)):
        name, data = inputs[number]
        file = kind.put(folder, name, data() if callable(data) else data)
        began = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            outcome, detail = try_one(kind, file)
        pipe.send((number, outcome, detail, time.perf_counter() - began))
    pipe.send(None)


def run_kind(kind, count, seed):
    """Try `count` files of a kind: list of (number, outcome, detail, seconds); and whether a canary appeared."""
    results, context = [], multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare(kind, Path(folder))
        suffix = Path(kind.place or "").suffix
        is_yaml, is_json = suffix == ".yaml", suffix == ".json"
        inputs = list(mutations.broken_files(kind.healthy, count, seed, is_yaml or is_json, is_json))
        inputs += [("bomb", data) for data in list(mutations.bombs(kind.healthy))[: count // 10]] if is_yaml else []
        if kind.read is read_pt:
            inputs += mutations.hostile_files(kind.healthy, count, seed)
        while len(results) < len(inputs):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(kind, Path(folder), inputs, len(results), writer))
            process.start()
            writer.close()
            results += listen(reader, len(results))
            process.kill()
            process.join()
        canary = any(Path(folder).rglob("canary"))
        os.chdir("/")
    return results, canary


def listen(reader, first):
    """What a child reports, until it has done all, dies or keeps silent."""
    results = []
    while True:
        try:
            if not reader.poll(PATIENCE):
                return [*results, (first + len(results), "hung", "", PATIENCE)]
            message = reader.recv()
        except EOFError:
            return [*results, (first + len(results), "crashed", "the process died", 0.0)]
        if message is None:
            return results
        results.append(message)


def main(arguments=None):
    """Run, print the table, and return whether every file was loaded or refused in words."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=200, help="files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", help="only these")
    parser.add_argument("--show", nargs="+", choices=OUTCOMES, metavar="OUTCOME", default=["crashed", "hung"],
                        help=f"of {', '.join(OUTCOMES)}")  # fmt: skip
    opt = parser.parse_args(arguments)
    good = True
    print(f"| {'kind':12} | inputs |" + "".join(f" {outcome:>7} |" for outcome in OUTCOMES) + " longest, s |")
    for name, kind in kinds().items():
        if opt.kinds and name not in opt.kinds:
            continue
        results, canary = run_kind(kind, opt.inputs, opt.seed)
        counts = Counter(outcome for _, outcome, _, _ in results)
        longest = max(seconds for _, _, _, seconds in results)
        print(f"| {name:12} | {len(results):6} |" + "".join(f" {counts[outcome]:7} |" for outcome in OUTCOMES)
              + f" {longest:10.2f} |" + (" CODE WAS RUN" if canary else ""), flush=True)  # fmt: skip
        shown = {detail[-100:]: row for row in reversed(results) if row[1] in opt.show for detail in [row[2]]}
        for number, outcome, detail, seconds in list(shown.values())[::-1][:MAX_SHOWN]:
            print(f"    {outcome} {name} {number} ({seconds:.2f} s): {detail}")
        good &= not (canary or counts["crashed"] or counts["hung"])
    return good


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command_line.run_tool(lambda _: not main())
