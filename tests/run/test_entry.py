"""How the programs end: status, streams, and one sentence instead of a traceback."""

import importlib.util
import io
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tqdm import tqdm

from utils.run import entry
from utils.system.progress import progress

ROOT = Path(__file__).resolve().parents[2]
# Something else stands for torch, whose import takes two seconds.
PROGRAM = """
import logging, sys
from unittest import mock
torch = mock.MagicMock()
torch.distributed.is_available.return_value = False
sys.modules |= {"torch": torch, "torch.distributed": torch.distributed}
from utils.run import entry

def main(opt):
    logging.getLogger("a").info("some news")
    logging.getLogger("a").warning("look out")
    logging.getLogger("a").debug("noise")
    raise ValueError("wrong")

entry.run(main, None)
print("never reached")
"""


@pytest.fixture(autouse=True)
def no_traceback(monkeypatch):
    monkeypatch.delenv("YOLOV7FAST_TRACEBACK", raising=False)
    monkeypatch.setattr(tqdm, "__init__", tqdm.__init__)  # a process of a rank above 0 has no bars


def raises(error):
    def main(opt):
        raise error

    return main


def test_options_arrive_and_the_program_goes_on():
    seen = []
    assert entry.run(seen.append, "options") is None and seen == ["options"]


def test_wrong_input_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        entry.run(raises(ValueError("a.yaml: no such file")), None)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: a.yaml: no such file\n"


def test_a_folder_that_is_gone(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit, match="2"):
        entry.run(lambda opt: pytest.fail("runs"), SimpleNamespace())
    assert capsys.readouterr().err == "error: the folder that this was started in has been removed; go to another one\n"


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("YOLOV7FAST_TRACEBACK", "1")
    with pytest.raises(ValueError, match="broken"):
        entry.run(raises(ValueError("broken")), None)


def test_a_log_that_nobody_reads_is_no_error(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(sys.stdout, "write", lambda text: raises(BrokenPipeError)(None))
    entry.run(lambda opt: logging.getLogger("a").info("some news"), None)
    assert capsys.readouterr().err == ""


def test_a_file_that_fails_in_a_thread_is_one_line(monkeypatch, capsys, caplog):
    """A daemon of TensorBoard's that finds the disk full; an error of the code stays a traceback."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    def main(opt):
        for error in (OSError(28, "No space left on device"), TypeError("a bug")):
            thread = threading.Thread(target=raises(error), args=(opt,))
            thread.start()
            thread.join()

    entry.run(main, SimpleNamespace(resume=False))
    (line,) = caplog.messages
    assert line.startswith("a file is not complete: No space left on device; make room, then train.py --resume")
    err = capsys.readouterr().err
    assert "TypeError: a bug" in err and "No space" not in err


def test_nothing_to_do_is_no_error(caplog):
    with caplog.at_level("INFO"):
        assert entry.run(raises(entry.NothingToDo("the run is finished")), None) is None
    assert "the run is finished" in caplog.text


def test_other_errors_keep_their_traceback():
    with pytest.raises(KeyError):
        entry.run(raises(KeyError("bug")), None)


@pytest.mark.parametrize(("rank", "level"), [(None, logging.INFO), ("0", logging.INFO), ("1", logging.WARNING)])
def test_other_ranks_only_warn(rank, level, monkeypatch):
    chosen = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **settings: chosen.update(settings))
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    entry.run(lambda opt: None, None)
    assert chosen["level"] == level


def test_other_ranks_do_not_repeat_what_rank_0_says(monkeypatch, capsys):
    """The first process of another machine has files of its own; the bars of rank 0 stand for all."""

    def main(opt):
        logging.getLogger("utils.data.labels.scan").warning("a row is dropped")
        logging.getLogger("utils.data.fast.shm_batches").warning("my own memory")
        logging.getLogger("utils.data.labels.scan").error("wrong")
        list(tqdm([1], desc="bar"))

    monkeypatch.setattr(logging.root, "handlers", [])
    heard = {}
    for rank, local_rank in (("0", "0"), ("1", "1"), ("2", "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        entry.run(main, None)
        heard[rank] = capsys.readouterr()
        logging.root.handlers.clear()
    assert {rank: said.out for rank, said in heard.items()} == {
        "0": "WARNING: a row is dropped\nWARNING: my own memory\nERROR: wrong\n",
        "1": "WARNING: process 1: my own memory\nERROR: process 1: wrong\n",
        "2": "WARNING: process 2: a row is dropped\nWARNING: process 2: my own memory\nERROR: process 2: wrong\n",
    }
    assert ["bar" in said.err for said in heard.values()] == [True, False, False]


@pytest.mark.parametrize("name", entry.OWN_NEWS)
def test_who_has_own_news_exists(name):
    """A logger has the name of its module: a module that has moved would not be heard."""
    assert importlib.util.find_spec(name)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "a/last.pt"), "a/last.pt: No space left on device; make room, then"),
        (PermissionError(13, "Permission denied", "a"), "a: Permission denied"),
        (OSError("odd"), "odd"),
        (MemoryError(), "the main memory is full: fewer --workers or a smaller --batch-size needs less"),
        (ValueError("two\n   lines\x07"), "two lines\\x07"),
        (ValueError("x" * 9999), "x" * 3000 + "..."),
        (RuntimeError("DataLoader worker (pid 3) is killed by signal: Bus error."), "DataLoader worker (pid 3)"),
        (ValueError("Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
                    "  File\nValueError: b.png: gone"), "b.png: gone"),
    ],
)  # fmt: skip
def test_one_line_for_every_error(error, line, capsys):
    with pytest.raises(SystemExit) as caught:
        entry.run(raises(error), SimpleNamespace(resume=False, workers=4, batch_size=8))
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.startswith(f"error: {line}") and said.count("\n") == 1


@pytest.mark.parametrize(("error", "status", "line"), [
    (KeyboardInterrupt(), 130, "interrupted"),
    (OSError(28, "No space left on device", "a.csv"), 2, "error: a.csv: No space left on device; make room"),
    (RuntimeError("CUDA error: unknown error\nmore"), 2, "error: CUDA error: unknown error; the GPU failed"),
    (MemoryError(), 2, "error: the main memory is full: a smaller --batch-size needs less"),
])  # fmt: skip
def test_only_a_training_can_be_resumed(error, status, line, capsys):
    for options, said in (({}, line), ({"resume": False}, "train.py --resume goes on")):
        with pytest.raises(SystemExit) as caught:
            entry.run(raises(error), SimpleNamespace(batch_size=8, **options))
        err = capsys.readouterr().err
        assert caught.value.code == status and (err == f"{line}\n" if not options else said in err or "memory" in err)


FAILED_GPU = """
import atexit, logging, os, sys, threading, time
from types import SimpleNamespace
from unittest import mock
torch = mock.MagicMock()
torch.distributed.is_available.return_value = torch.cuda.is_current_stream_capturing.return_value = False
sys.modules |= {"torch": torch, "torch.distributed": torch.distributed}
from utils.run import entry

class Pinned:
    def __del__(self):
        os.abort()

def main(opt):
    def query():
        raise RuntimeError(sys.argv[1] + ".\\nCUDA kernel errors might be asynchronously reported")

    def batches():
        try:
            yield 1
        finally:
            query()

    pinned, torch.cuda.current_stream().query = Pinned(), query
    atexit.register(print, "put away")
    threading.Thread(target=lambda: time.sleep(0.2) or print("written")).start()
    for _ in batches():
        raise RuntimeError(sys.argv[2])

entry.run(main, SimpleNamespace(**{"resume": False} if sys.argv[3:] else {}))
"""


@pytest.mark.parametrize(
    ("found", "reason", "advice"),
    [("Triton Error [CUDA]: an illegal memory access was encountered", "CUDA error: an illegal memory access",
      "; a kernel on the GPU (YOLOV7FAST_TRACEBACK=1 CUDA_LAUNCH_BLOCKING=1 shows which) failed"),
     ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "CUDA error: unspecified launch failure", "; the GPU failed")],
    ids=["kernel", "card"],
)  # fmt: skip
def test_a_gpu_that_does_no_more_work_is_asked_why_and_nothing_of_it_is_freed(found, reason, advice):
    """Whoever meets the failure first says it in words of its own; what is pinned aborts the process when it goes."""
    for option, end in (((), "\n"), (("train",), f", {entry.RESUME}\n")):
        done = subprocess.run([sys.executable, "-c", FAILED_GPU, reason, found, *option], cwd=ROOT, capture_output=True,
                              text=True, timeout=120)  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "written\nput away\n")
        assert done.stderr == f"error: {reason}{advice}{end}"


def test_ctrl_c_ends_a_process_whose_gpu_failed_while_a_thread_is_stuck():
    program = FAILED_GPU.replace('time.sleep(0.2) or print("written")', "time.sleep(0.5) or os.kill(os.getpid(), 2)")
    program = program.replace("    for _", "    threading.Thread(target=time.sleep, args=(600,)).start()\n    for _")
    done = subprocess.run([sys.executable, "-c", f"import os\n{program}", "CUDA error: gone", "any"], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: CUDA error: gone; ") and done.stderr.count("\n") == 1


LEAVING = """
import atexit, sys, threading, time
from types import SimpleNamespace

sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: bool(sys.argv[1:])))
from utils.run import entry

class Kept:
    def __del__(self):
        print("freed")

kept, entry.give_back_gpus = Kept(), lambda: print("given back")
atexit.register(print, "put away")
threading.Thread(target=lambda: time.sleep(0.2) or print("written")).start()
entry.leave()
print("still here")
"""


@pytest.mark.parametrize(
    ("uses_gpu", "said"), [(True, "written\nput away\ngiven back\n"), (False, "still here\nwritten\nput away\nfreed\n")]
)
def test_a_program_with_a_gpu_leaves_without_freeing_anything(uses_gpu, said):
    words = [sys.executable, "-c", LEAVING, *["gpu"] * uses_gpu]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_what_was_said_before_ctrl_c_ends_the_wait_for_a_thread_is_written():
    ctrl_c = "entry.os.kill(entry.os.getpid(), 2) or time.sleep(600)"
    program = LEAVING.replace('print("written")', ctrl_c).replace("entry.leave()", 'print("done")\nentry.leave()')
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-c", program, "gpu"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_no_gpu_is_asked_while_torch_is_being_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert entry.gpu_failure() is None


def test_no_gpu_is_asked_while_a_graph_is_captured(monkeypatch):
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: True)
    monkeypatch.setattr(
        "torch.cuda.current_stream", lambda: SimpleNamespace(query=lambda: raises(RuntimeError("asked"))(None))
    )
    assert entry.gpu_failure() is None


def test_a_gpu_that_works_is_not_asked_for_long(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(query=lambda: False))
    with pytest.raises(RuntimeError, match="a bug"):
        entry.run(raises(RuntimeError("a bug")), SimpleNamespace())
    with pytest.raises(SystemExit):
        entry.run(raises(ValueError("wrong")), SimpleNamespace())


def test_names_that_the_terminal_lacks():
    code = PROGRAM.replace('"some news"', '"\u540d"').replace('"wrong"', '"\u540d"')
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={"PYTHONIOENCODING": "ascii", "PATH": ""})  # fmt: skip
    assert done.stdout == "\\u540d\nWARNING: look out\n" and done.stderr == "error: \\u540d\n"


def test_streams_of_a_process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "some news\nWARNING: look out\n", "error: wrong\n")


class OutOfMemoryError(RuntimeError):
    """Named as torch's own."""


@pytest.mark.parametrize(
    "error",
    [OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB\nmore"),
     RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous"),
     RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")],
    ids=["torch", "driver", "library"],
)  # fmt: skip
def test_a_full_gpu_is_one_sentence(error, capsys):
    opt = SimpleNamespace(batch_size=64, total_batch_size=128, img_size=[640, 320], amp="off")
    with pytest.raises(SystemExit) as caught:
        entry.run(raises(error), opt)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: the GPU has too little memory for batch size 128 and image size 640: give a smaller "
    )
    for advice in ("--batch-size", "--img-size", "--amp fp16", str(error).splitlines()[0]):
        assert advice in line


def test_a_full_host_and_a_resumed_run(capsys):
    error = RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried")
    with pytest.raises(SystemExit):
        entry.run(raises(error), SimpleNamespace(batch_size=16, img_size=320, resume=True))
    line = capsys.readouterr().err
    assert "the host has too little memory for the batch and image size of the resumed run" in line
    assert "--amp" not in line


STUCK = """
import sys, time
from utils.run import entry

def main(opt):
    try:
        print("runs", flush=True)
        time.sleep(600)
    finally:
        print("puts away", flush=True)
        time.sleep(float(sys.argv[1]))

entry.run(main, None, "the same command goes on")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_a_program_in_order(number):
    """One line and the status that a shell has for the signal; a second one waits for nothing."""
    line = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
    for seconds in (0, 600):
        with subprocess.Popen([sys.executable, "-c", STUCK, str(seconds)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as program:  # fmt: skip
            assert program.stdout.readline() == "runs\n"
            program.send_signal(number)
            assert program.stdout.readline() == "puts away\n"
            if seconds:
                program.send_signal(number)
            said = program.communicate(timeout=60)[1]
        if seconds and number == signal.SIGTERM:
            assert program.returncode == -number and not said
        else:
            assert program.returncode == 128 + number and said == f"{line}; the same command goes on\n"


@pytest.mark.parametrize("program", ["train", "test", "detect", "export"])
def test_ctrl_c_while_modules_are_imported_shows_no_traceback(program, tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, f"{program}.py", "--fast"], cwd=ROOT, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:  # fmt: skip
        assert started.stdout.readline() == "importing\n"
        started.send_signal(signal.SIGINT)
        assert started.communicate(timeout=60)[1] == "" and started.returncode == -signal.SIGINT


def test_other_errors_of_torch_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shapes"):
        entry.run(raises(RuntimeError("shapes do not fit")), None)


@pytest.mark.gpu
def test_a_really_full_gpu(capsys):
    import torch

    with pytest.raises(SystemExit) as caught:
        entry.run(lambda opt: torch.empty(1 << 50, device="cuda"), SimpleNamespace(batch_size=2, img_size=[64, 64]))
    assert caught.value.code == 2 and "too little memory for batch size 2 and image size 64" in capsys.readouterr().err


def test_news_of_matplotlib_are_not_ours(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    entry.set_logging()
    logging.getLogger("matplotlib.font_manager").info("generated new fontManager")
    logging.getLogger("matplotlib.font_manager").warning("a font is missing")
    logging.getLogger("utils").info("our own")
    logging.root.handlers.clear()
    assert capsys.readouterr().out == "WARNING: a font is missing\nour own\n"


def test_a_message_stands_above_a_living_bar(monkeypatch):
    """One terminal shows both streams; the bar is wiped, the line written, the bar drawn again below it."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(logging.root, "handlers", [])
    entry.set_logging()
    for _ in progress([1], desc="train"):
        logging.getLogger("utils").warning("news")
    logging.root.handlers.clear()
    before, after = terminal.getvalue().split("WARNING: news\n")
    assert before.endswith("\r") and not before.split("\r")[-2].strip(), "wiped"
    assert after.lstrip("\r").startswith("train:") and not after.split("\r")[-2].strip(), "and gone at the end"
