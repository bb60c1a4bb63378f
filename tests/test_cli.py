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


def test_streams_of_a_process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (2, "some news\nWARNING: look out\n", "error: wrong\n")
