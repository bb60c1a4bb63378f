"""A detector of random weights that finds something, pictures and films for it, a camera on the loopback address."""

import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import cv2
import numpy as np
import torch

import detect
from tests.heads_cases import small_model
from tests.tiny_model import tiny_model
from utils.config.options import detect_parser


def random_detector(nc=2, heads=False):
    """In training mode; what it finds depends on the picture."""
    torch.manual_seed(3)
    model = small_model(3) if heads else tiny_model(nc)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 4 and parameter.shape[0] > 1:  # a convolution; else every picture looks the same
                parameter *= 3 if parameter.shape[-1] == 3 else 6
        for _, bias, *_ in model.model[-1].output_biases():
            rows = bias.view(model.model[-1].na, -1)
            rows[:, 4] += 3
            rows[:, 5:] += 1
    model.names = ["red", "green", "blue"][: model.yaml["nc"]]
    return model


def write_weights(path, **options):
    torch.save({"model": random_detector(**options)}, path)
    return path


def picture(seed=0, height=64, width=64):
    """[h x w x 3, uint8, BGR]: coloured blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return np.ascontiguousarray(blocks.repeat(8, 0).repeat(8, 1)[:height, :width])


def write_film(path, num_frames=60, fps=20, height=48, width=64):
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
    for number in range(num_frames):
        writer.write(picture(number % 7, height, width))
    writer.release()
    return path


def frames_of(path):
    """(frames that can be read, frames a second) of a video file."""
    capture, count = cv2.VideoCapture(str(path)), 0
    while capture.read()[0]:
        count += 1
    return count, capture.get(cv2.CAP_PROP_FPS)


def line_of(weights, source, project, *flags):
    return ["--weights", str(weights), "--source", *map(str, source if isinstance(source, list) else [source]),
            "--img", "64", "--device", "cpu", "--project", str(project), "--name", "out", *flags]  # fmt: skip


def run(weights, source, project, *flags):
    """Run the program in this process; returns (its output folder, its status)."""
    status = 0
    with mock.patch("tqdm.tqdm.update"):
        try:
            detect.main(detect_parser().parse_args(line_of(weights, source, project, *flags)))
        except SystemExit as end:
            status = end.code
    return project / "out", status


@contextmanager
def file_server(folder):
    """The address of a server for the files of a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with _serving(partial(Quiet, directory=str(folder))) as address:
        yield address


@contextmanager
def _serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def camera(frames_by_connection, pause=0.02):
    """An MJPEG server; connection k sends frames_by_connection[k] frames, each a shade of gray, and ends.

    The last number holds for all further connections. Yields (address, list of the connections so far).
    """
    connections, ended = [], threading.Event()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            number = frames_by_connection[min(len(connections), len(frames_by_connection) - 1)]
            connections.append(number)
            shade = 40 * len(connections)
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            data = cv2.imencode(".jpg", np.full((48, 64, 3), shade, np.uint8))[1].tobytes()
            for _ in range(number):
                if ended.is_set():
                    return
                head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                try:
                    self.wfile.write(head.encode() + data + b"\r\n")
                except OSError:
                    return
                time.sleep(pause)

        def log_message(self, *args):
            pass

    with _serving(Answer) as address:
        try:
            yield f"{address}/video.mjpg", connections
        finally:
            ended.set()
