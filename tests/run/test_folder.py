"""New and resumed runs: their folder, their options, and what cannot be resumed."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from utils.config.flags import KEPT, MACHINE, STAYS, TRAIN_FLAGS, Flag
from utils.config.hyp import DEFAULTS, save_hyp
from utils.config.options import read_options, save_options, train_parser
from utils.run.entry import NothingToDo
from utils.run.folder import newest_checkpoint, open_run_folder, prepare_train_options
from utils.system.distributed import Ranks
from utils.system.files import PROJECT_ROOT

OPTIMIZER = {"state": {}, "param_groups": []}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, with the files that a run names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set.yaml").write_text("train: images\n")
    (tmp_path / "cfg.yaml").write_text("nc: 2\n")
    save_hyp(DEFAULTS, tmp_path / "hyp.yaml")
    return tmp_path


@pytest.fixture
def prepare(monkeypatch):
    """Options of a command line, prepared, with their run folder open."""

    def parse_and_prepare(line, ranks=Ranks()):
        monkeypatch.setattr("sys.argv", ["train.py", *line.split()])
        opt = prepare_train_options(train_parser().parse_args(line.split()), ranks)
        with monkeypatch.context() as here:
            here.chdir(opt.working_dir)  # as train.py does
            open_run_folder(opt, ranks)
        return opt

    return parse_and_prepare


NEW = "--data set.yaml --cfg cfg.yaml --hyp hyp.yaml --weights= --batch-size 8 --epochs 5"


def checkpoint(path, epoch, optimizer=OPTIMIZER):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"w": torch.ones(1)}, "epoch": epoch, "optimizer": optimizer, "ema": None}, path)
    return path


def old_run(name="exp", epoch=2, optimizer=OPTIMIZER, epochs=5):
    """A run folder as training leaves it; returns its last.pt."""
    run = Path("runs/train") / name
    last = checkpoint(run / "weights" / "last.pt", epoch, optimizer)
    opt = train_parser().parse_args(NEW.split())
    opt.epochs, opt.batch_size, opt.img_size, opt.name, opt.adam = epochs, 4, [64, 64], name, True
    opt.save_dir, opt.total_batch_size, opt.world_size, opt.global_rank = str(run), 8, 2, 0
    save_options(opt, run / "opt.yaml")
    save_hyp(DEFAULTS | {"lr0": 0.5}, run / "hyp.yaml")
    return last


# ---- new runs -------------------------------------------------------------------------------------------------------


def test_new_run(prepare, folder):
    opt = prepare(f"{NEW} --img 64")
    assert Path(opt.save_dir) == Path("runs/train/exp") and Path(opt.save_dir).is_dir()
    assert (opt.batch_size, opt.total_batch_size, opt.world_size, opt.global_rank) == (8, 8, 1, -1)
    assert opt.img_size == [64, 64] and Path(opt.cfg).samefile(folder / "cfg.yaml")
    assert Path(prepare(NEW).save_dir).name == "exp2"
    assert Path(prepare(f"{NEW} --exist-ok").save_dir).name == "exp"
    assert Path(prepare(f"{NEW} --project other --name a").save_dir) == Path("other/a")


def test_processes_share_the_batch(prepare):
    opt = prepare(NEW, Ranks(0, 0, 4))
    assert (opt.batch_size, opt.total_batch_size, opt.world_size, opt.global_rank) == (2, 8, 4, 0)
    with pytest.raises(ValueError, match="--batch-size 8 does not divide among 3 processes"):
        prepare(NEW, Ranks(0, 0, 3))


def test_nothing_is_written_before_the_folder_is_opened(folder):
    before = sorted(folder.rglob("*"))
    opt = prepare_train_options(train_parser().parse_args(NEW.split()), Ranks())
    assert opt.save_dir == "" and sorted(folder.rglob("*")) == before


def test_only_the_main_process_makes_a_folder(prepare, folder):
    opt = prepare(NEW, Ranks(1, 1, 2))
    assert opt.save_dir == "" and not (folder / "runs").exists()


def test_search_reuses_its_folder(prepare):
    assert Path(prepare(f"{NEW} --evolve").save_dir).name == "evolve"
    assert Path(prepare(f"{NEW} --evolve 3").save_dir).name == "evolve"
    with pytest.raises(ValueError, match="--evolve runs in a single process"):
        prepare(f"{NEW} --evolve", Ranks(0, 0, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--data none.yaml", "none.yaml does not exist"),
        ("--hyp none.yaml", "none.yaml does not exist"),
        ("--cfg none.yaml", "none.yaml does not exist"),
        ("--cfg=", "give --cfg"),
        ("--epochs 0", "--epochs 0 is too small"),
    ],
)
def test_wrong_options_leave_no_folder(change, message, prepare, folder):
    with pytest.raises(ValueError, match=message):
        prepare(f"{NEW} {change}")
    assert not (folder / "runs").exists()


def test_idle_flags_are_named(prepare, caplog):
    prepare(f"{NEW} --bucket gs")
    assert "--bucket" in caplog.text


# ---- resumed runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["--resume {folder}/runs/train/exp/weights/last.pt", "--resume"])
def test_resume(how, prepare, folder, caplog):
    old_run()
    with caplog.at_level(logging.INFO):
        opt = prepare(how.format(folder=folder))
    assert (opt.weights, opt.save_dir) == ("runs/train/exp/weights/last.pt", "runs/train/exp"), "short, for messages"
    assert opt.resume is True and opt.cfg == "" and opt.adam and opt.epochs == 5 and opt.img_size == [64, 64]
    assert (opt.batch_size, opt.total_batch_size, opt.world_size, opt.global_rank) == (8, 8, 1, -1)
    assert Path(opt.data).samefile(folder / "set.yaml") and Path(opt.hyp).samefile(folder / "hyp.yaml")
    assert "Resuming runs/train/exp after epoch 2" in caplog.messages and "ignored" not in caplog.text
    assert len(list(Path("runs/train").iterdir())) == 1, "no new folder"


def test_resume_on_other_processes(prepare):
    old_run()
    opt = prepare("--resume", Ranks(3, 3, 4))
    assert (opt.batch_size, opt.total_batch_size, opt.global_rank, opt.save_dir) == (2, 8, 3, "runs/train/exp")


def test_what_may_change(prepare, caplog):
    old_run()
    opt = prepare("--resume --epochs 9 --device cpu --workers 0 --batch-size 2 --linear-lr")
    assert (opt.epochs, opt.device, opt.workers) == (9, "cpu", 0)
    assert opt.batch_size == opt.total_batch_size == 2 and opt.linear_lr is False
    assert "ignored: linear_lr" in caplog.text
    noted = prepare("--resume")
    assert (noted.epochs, noted.batch_size) == (9, 2), "the next resume goes on with them"
    assert noted.workers == 8, "unlike what only says how a machine does it"


def test_what_changes_speed_may_change_in_both_directions(prepare, caplog):
    old_run()
    opt = prepare("--resume --fast --fast-step --cuda-graph --fast-val --sync-interval 5 --amp bf16 --worker-tensor")
    assert opt.fast and opt.fast_step and opt.cuda_graph and opt.fast_val and opt.worker_tensor
    assert (opt.sync_interval, opt.amp) == (5, "bf16") and "ignored" not in caplog.text
    opt = read_options("runs/train/exp/opt.yaml")[0]
    assert not opt.fast and opt.amp is None, "the next resume goes on as the run began"
    opt.fast = True
    save_options(opt, Path("runs/train/exp/opt.yaml"))
    assert prepare("--resume").fast and not prepare("--resume --no-fast").fast


@pytest.mark.parametrize(("rule", "value"), [(KEPT, 2), (STAYS, 3), (MACHINE, 3)])
def test_the_row_of_a_new_flag_says_what_resume_does(rule, value, prepare, monkeypatch, caplog):
    monkeypatch.setitem(TRAIN_FLAGS, "new_flag", Flag("--new-flag", None, 2, int, resume=rule, group="machine"))
    old_run()
    assert prepare("--resume --new-flag 3").new_flag == value
    assert ("ignored: new_flag" in caplog.text) == (rule == KEPT)
    assert prepare("--resume").new_flag == (3 if rule == STAYS else 2)


def test_resume_from_inside_the_run_folder(prepare, folder, monkeypatch):
    last = old_run().absolute()
    monkeypatch.chdir(last.parent)
    (last.parent / "set.yaml").write_text("")  # where set.yaml is looked for now
    for name in ("last.pt", "./last.pt", "../weights/last.pt"):
        assert Path(folder, prepare(f"--resume {name}").save_dir).samefile(last.parent.parent)


def test_finished_run(prepare):
    old_run(epoch=4)
    with pytest.raises(NothingToDo, match="^runs/train/exp has finished its 5 epochs; --resume with a larger --epochs"):
        prepare("--resume")
    with pytest.raises(NothingToDo, match="finished its 3 epochs"):
        prepare("--resume --epochs 3")
    assert prepare("--resume --epochs 6").epochs == 6
    last = old_run("other", epoch=None)
    with pytest.raises(NothingToDo, match="holds no training state"):
        prepare(f"--resume {last}")


def test_stripped_run_goes_on_from_its_full_state(prepare):
    last = old_run(epoch=-1, optimizer=None)
    with pytest.raises(NothingToDo, match="last.pt is finished and holds no training state: start a new run with"):
        prepare("--resume")
    with pytest.raises(ValueError, match="holds no training state, which --epochs 8 needs: put last_full.pt back"):
        prepare("--resume --epochs 8")
    full = checkpoint(last.with_name("last_full.pt"), 4)
    os.utime(last)
    with pytest.raises(NothingToDo, match="finished its 5 epochs"):
        prepare(f"--resume {last}")
    for how in (last, last.with_name("last_full.pt"), ""):
        assert Path(prepare(f"--resume {how} --epochs 8").weights).samefile(full)


def test_moved_run(prepare):
    old_run()
    Path("hyp.yaml").unlink()
    Path("runs/train/exp").rename("elsewhere")
    opt = prepare("--resume elsewhere/weights/last.pt")
    assert Path(opt.save_dir).samefile("elsewhere") and Path(opt.hyp).samefile("elsewhere/hyp.yaml")
    assert Path(opt.weights).samefile("elsewhere/weights/last.pt")
    assert read_options(Path("elsewhere/opt.yaml"))[0].hyp == "hyp.yaml", "the run's own record is not changed"


def test_newest_run(prepare, monkeypatch):
    deploy, full = (checkpoint(Path("a", name), 1) for name in ("last_deploy.pt", "last_full.pt"))
    times = {old_run("exp"): 20, old_run("exp2"): 30, full: 10, deploy: 99}
    checkpoint(Path("b/best.pt"), 1)
    Path("last.pt").mkdir()
    real = Path.stat

    def stat(path, **options):
        result = real(path, **options)
        if path not in times:
            return result
        return os.stat_result([*result[:9], times[path]], {"st_ctime": float(times[path])})

    monkeypatch.setattr(Path, "stat", stat)
    assert newest_checkpoint() == Path("runs/train/exp2/weights/last.pt")
    assert Path(prepare("--resume").save_dir).name == "exp2"
    times[full] = 40
    assert newest_checkpoint() == full


def test_strict_data_is_about_one_start(prepare):
    old_run()
    assert prepare("--resume --strict-data").strict_data
    assert not prepare("--resume").strict_data


def test_what_cannot_be_resumed(prepare):
    with pytest.raises(ValueError, match="there is no last.pt below the working directory"):
        prepare("--resume")
    with pytest.raises(ValueError, match="none.pt: no such checkpoint"):
        prepare("--resume none.pt")
    last = old_run()
    (last.parent.parent / "opt.yaml").unlink()
    with pytest.raises(ValueError, match="opt.yaml is missing"):
        prepare("--resume")
    last = old_run()
    Path("set.yaml").unlink()
    with pytest.raises(ValueError, match="set.yaml does not exist"):
        prepare("--resume")
    last.write_bytes(last.read_bytes()[:100])
    with pytest.raises(ValueError, match="last.pt is no checkpoint"):
        prepare("--resume")


def test_options_that_a_person_has_edited(prepare):
    path = old_run().parent.parent / "opt.yaml"
    before = path.read_text()
    path.write_text(before.replace("total_batch_size: 8", "total_batch_size: 0"))
    with pytest.raises(ValueError, match="opt.yaml: total_batch_size 0 is too small"):
        prepare("--resume")
    path.write_text(before.replace("evolve: 0", "evolve: 3"))
    with pytest.raises(ValueError, match="opt.yaml: evolve has to be 0"):
        prepare("--resume")
    path.write_text(before.replace("patience: 0", "patience: 5").replace("notest: false", "notest: true"))
    with pytest.raises(ValueError, match="exp/opt.yaml: --patience needs validations"):
        prepare("--resume")
    with pytest.raises(ValueError, match="exp/opt.yaml with what was typed: --patience needs validations"):
        prepare("--resume --epochs 9")
    path.write_text(before + "5: a key that is a number\n")
    open_run_folder(prepare("--resume"), Ranks())
    assert yaml.safe_load(path.read_text())[5] == "a key that is a number"


# ---- one process owns a run folder ----------------------------------------------------------------------------------

OWNER = """
import sys, time
from utils.system.folder_lock import own
own(sys.argv[1], "")
print(1, flush=True)
time.sleep(600)
"""


@pytest.fixture
def in_use(monkeypatch):
    """Makes a folder and another process that owns it, as long as the test lasts."""
    processes = []

    def start(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-c", OWNER, str(Path(folder).absolute())]
        processes.append(subprocess.Popen(words, cwd=PROJECT_ROOT, stdout=subprocess.PIPE))
        processes[-1].stdout.readline()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("line", "used", "advice"),
    [
        (f"{NEW} --exist-ok", "runs/train/exp", "choose another --name or --project"),
        (f"{NEW} --exist-ok --project other --name a/b", "other/a/b", "choose another --name or --project"),
        (f"{NEW} --evolve 2", "runs/train/evolve", "choose another --name or --project"),
        ("--resume runs/train/exp/weights/last.pt", "runs/train/exp", "start a new run with --weights"),
        ("--resume", "runs/train/exp", "start a new run with --weights"),
    ],
)
def test_a_folder_that_another_process_writes_into_is_refused(line, used, advice, prepare, in_use, monkeypatch):
    old_run()
    process = in_use(used)
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr("utils.run.folder.read_checkpoint", lambda path: pytest.fail("it is being written"))
        with pytest.raises(ValueError, match=f"{used} is in use: process {process.pid} on .*; wait .*, or {advice}$"):
            prepare(line)
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    process.kill()
    process.wait()
    assert (Path(prepare(f"{NEW} --exist-ok").save_dir) / ".lock").exists()


def test_two_that_begin_at_the_same_moment(prepare, in_use, monkeypatch):
    monkeypatch.setattr("utils.run.folder.check_free", lambda folder, advice: in_use(folder))  # just after the look
    with pytest.raises(ValueError, match="exp is in use"):
        prepare(f"{NEW} --exist-ok")


def test_only_the_main_process_asks(prepare, in_use):
    old_run()
    in_use("runs/train/exp")
    assert prepare("--resume", Ranks(1, 1, 2)).save_dir and prepare(f"{NEW} --exist-ok", Ranks(1, 1, 2)).save_dir == ""
    with pytest.raises(ValueError, match="is in use"):
        prepare("--resume", Ranks(0, 0, 2))


def test_a_new_run_beside_a_living_one(prepare, in_use):
    in_use("runs/train/exp")
    assert Path(prepare(NEW).save_dir).name == "exp2"


# ---- paths are what they were when the run was started --------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path_factory, monkeypatch):
    """Enters another folder, where namesakes lie; returns it."""

    def enter():
        place = tmp_path_factory.mktemp("elsewhere")
        (place / "set.yaml").write_text("train: images\n")
        save_hyp(DEFAULTS, place / "hyp.yaml")
        monkeypatch.chdir(place)
        return place

    return enter


def started_here():
    """A run as it is written today; returns the absolute path of its last.pt."""
    last = old_run().absolute()
    opt = read_options(last.parent.parent / "opt.yaml")[0]
    opt.save_dir, opt.working_dir, opt.total_batch_size = "runs/train/exp", os.getcwd(), 8
    save_options(opt, last.parent.parent / "opt.yaml")
    return last


@pytest.mark.parametrize("make", [started_here, lambda: old_run().absolute()], ids=["today", "earlier version"])
def test_resume_from_another_folder(make, prepare, folder, elsewhere, caplog):
    last = make()
    elsewhere()
    caplog.set_level(logging.INFO)
    opt = prepare(f"--resume {last}")
    assert (opt.working_dir, opt.data, opt.hyp) == (str(folder), "set.yaml", "hyp.yaml")
    assert f"relative paths count from {folder}" in caplog.text
    assert prepare(f"--resume {last}").working_dir == str(folder) == load_raw(last)["working_dir"]


def load_raw(last):
    return yaml.safe_load((last.parent.parent / "opt.yaml").read_text())


def test_resume_where_the_run_and_its_files_were_moved_to(prepare, folder, tmp_path_factory, elsewhere):
    (folder / "project").mkdir()
    for name in ("set.yaml", "hyp.yaml"):
        (folder / name).rename(folder / "project" / name)
    os.chdir(folder / "project")
    last = started_here()
    moved = tmp_path_factory.mktemp("mount") / "project"
    (folder / "project").rename(moved)
    elsewhere()
    opt = prepare(f"--resume {moved / last.relative_to(folder / 'project')}")
    assert (opt.working_dir, opt.data, opt.save_dir) == (str(moved), "set.yaml", "runs/train/exp")


def test_a_run_that_was_moved_alone_finds_its_files(prepare, folder, elsewhere):
    started_here()
    place = elsewhere()
    (folder / "runs/train/exp").rename(place / "mine")
    assert prepare("--resume mine/weights/last.pt").working_dir == str(folder)


def test_a_namesake_is_not_taken(prepare, folder, elsewhere):
    last = started_here()
    (folder / "set.yaml").unlink()
    elsewhere()
    with pytest.raises(ValueError, match=f"exp/opt.yaml: {folder}/set.yaml does not exist; put it back, or correct"):
        prepare(f"--resume {last}")


def test_a_run_that_does_not_say_where_it_was_started(prepare, folder, elsewhere, caplog):
    old_run()
    place = elsewhere()
    (folder / "runs/train/exp").rename(place / "mine")
    opt = prepare("--resume mine/weights/last.pt")
    assert opt.working_dir == str(place) and opt.hyp == str(place / "mine/hyp.yaml"), "the hyp.yaml here is a namesake"
    assert f"was started is not known or gone: what is relative, such as set.yaml, counts from {place}" in caplog.text


def test_absolute_paths_hold_everywhere(prepare, folder, elsewhere, caplog):
    last = started_here()
    content = load_raw(last) | {"data": str(folder / "set.yaml"), "hyp": str(folder / "hyp.yaml")}
    (last.parent.parent / "opt.yaml").write_text(yaml.safe_dump(content | {"working_dir": str(folder / "gone")}))
    place = elsewhere()
    last.parent.parent.rename(place / "mine")
    opt = prepare("--resume mine/weights/last.pt")
    assert (opt.working_dir, opt.data, opt.hyp) == (str(place), content["data"], content["hyp"])
    assert "counts from" in caplog.text, "what is relative in the data yaml"
