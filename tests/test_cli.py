"""How the programs end: status, streams, and one sentence instead of a traceback."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from utils import cli
from utils.runs import NothingToDo

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import logging
from utils import cli

def main(opt):
    logging.getLogger("a").info("some news")
    logging.getLogger("a").warning("look out")
    logging.getLogger("a").debug("noise")
    raise ValueError("wrong")

cli.run(main, None)
print("never reached")
"""


@pytest.fixture(autouse=True)
def no_traceback(monkeypatch):
    monkeypatch.delenv("YOLOV7FAST_TRACEBACK", raising=False)


def raises(error):
    def main(opt):
        raise error

    return main


def test_options_arrive_and_the_program_goes_on():
    seen = []
    assert cli.run(seen.append, "options") is None and seen == ["options"]


def test_wrong_input_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run(raises(ValueError("a.yaml: no such file")), None)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: a.yaml: no such file\n"


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("YOLOV7FAST_TRACEBACK", "1")
    with pytest.raises(ValueError, match="broken"):
        cli.run(raises(ValueError("broken")), None)


def test_nothing_to_do_is_no_error(caplog):
    with caplog.at_level("INFO"):
        assert cli.run(raises(NothingToDo("the run is finished")), None) is None
    assert "the run is finished" in caplog.text


def test_other_errors_keep_their_traceback():
    with pytest.raises(KeyError):
        cli.run(raises(KeyError("bug")), None)


@pytest.mark.parametrize(("rank", "level"), [(None, logging.INFO), ("0", logging.INFO), ("1", logging.WARNING)])
def test_other_ranks_only_warn(rank, level, monkeypatch):
    chosen = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **settings: chosen.update(settings))
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    cli.run(lambda opt: None, None)
    assert chosen["level"] == level


def test_other_ranks_do_not_repeat_what_all_read(monkeypatch, capsys):
    def main(opt):
        logging.getLogger("utils.labels").warning("a row is dropped")
        logging.getLogger("utils.slabs").warning("my own memory")

    monkeypatch.setattr(logging.root, "handlers", [])
    heard = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        cli.run(main, None)
        heard[rank] = capsys.readouterr().out
        logging.root.handlers.clear()
    assert heard == {
        "0": "WARNING: a row is dropped\nWARNING: my own memory\n",
        "1": "WARNING: my own memory\n",
    }


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "a/last.pt"), "a/last.pt: No space left on device; make room, then"),
        (PermissionError(13, "Permission denied", "a"), "a: Permission denied"),
        (OSError("odd"), "odd"),
        (MemoryError(), "the main memory is full: fewer --workers"),
        (ValueError("two\n   lines\x07"), "two lines\\x07"),
        (ValueError("x" * 9999), "x" * 3000 + "..."),
        (RuntimeError("DataLoader worker (pid 3) is killed by signal: Bus error."), "DataLoader worker (pid 3)"),
        (ValueError("Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
                    "  File\nValueError: b.png: gone"), "b.png: gone"),
    ],
)  # fmt: skip
def test_one_line_for_every_error(error, line, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run(raises(error), None)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.startswith(f"error: {line}") and said.count("\n") == 1


def test_names_that_the_terminal_lacks():
    code = PROGRAM.replace('"some news"', '"\u540d"').replace('"wrong"', '"\u540d"')
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={"PYTHONIOENCODING": "ascii", "PATH": ""})  # fmt: skip
    assert done.stdout == "\\u540d\nWARNING: look out\n" and done.stderr == "error: \\u540d\n"


def test_streams_of_a_process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "some news\nWARNING: look out\n", "error: wrong\n")
