"""A program writes on whatever becomes of its standard streams: each case is a process of its own.

Torch, whose import takes two seconds, is not what they are about: something else stands for it.
"""

import fcntl
import io
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from utils.system.streams import LastingStream

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import logging, multiprocessing, sys
from pathlib import Path
from unittest import mock
from tqdm import tqdm
sys.modules |= {"torch": mock.MagicMock(), "torch.distributed": mock.MagicMock()}
from utils.run import entry

def child():
    print("from a child", flush=True)

def main(opt):
    file = Path("content").open("w")
    assert file.fileno() > 2  # else what libraries print lands in it
    for number in tqdm(range(300)):
        print("x" * 1000, flush=True)
        print("y" * 1000, file=sys.stderr)
        logging.getLogger("a").warning("news %d", number)
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0 or method == "spawn"  # such a child starts with the broken stream
    file.write("whole")
    file.close()

if __name__ == "__main__":
    entry.run(main, None)
"""


@pytest.mark.parametrize(
    "streams",
    [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "> /dev/full", "2> /dev/full", "> /dev/full 2>&1", "2>&1 | true",
     "2>&1 | head -n 3 > drawn", "2> >(true) > /dev/null", "| true"],
)  # fmt: skip
def test_a_program_outlives_its_streams(streams, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = f"env PYTHONPATH={ROOT} {sys.executable} program.py {streams}; echo ${{PIPESTATUS[0]}} > status"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=120)
    assert (tmp_path / "status").read_text() == "0\n"
    assert (tmp_path / "content").read_text() == "whole"


@pytest.mark.parametrize(("hangup", "ends"), [(signal.SIG_IGN, True), (signal.SIG_DFL, False)], ids=["nohup", "plain"])
def test_a_terminal_that_is_closed(hangup, ends, tmp_path):
    """The signal stays deadly, unless it is ignored, as by nohup: then writing goes on into nothing."""
    (tmp_path / "program.py").write_text(PROGRAM)
    screen, terminal = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, hangup)

    process = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=terminal, stderr=terminal,
                               preexec_fn=take_terminal, env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    os.close(terminal)
    os.read(screen, 1000)
    os.close(screen)
    assert process.wait(120) == (0 if ends else -signal.SIGHUP)
    assert not ends or (tmp_path / "content").read_text() == "whole"


def test_what_can_be_written_arrives():
    inner = io.StringIO()
    stream = LastingStream(inner)
    print("a line", file=stream, flush=True)
    stream.writelines(["b", "c"])
    assert inner.getvalue() == "a line\nbc" and stream.isatty() is False
    inner.close()
    assert stream.write("lost") == 4
    stream.flush()


def test_no_stream_at_all():
    stream = LastingStream(None)
    assert stream.write("nowhere") == 7 and stream.fileno() > 2


def test_an_interruption_is_not_swallowed():
    inner = io.StringIO()
    inner.write = lambda text: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        LastingStream(inner).write("x")
