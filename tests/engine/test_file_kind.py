"""What people give for weights that are none: the first bytes tell what it is, and the message what to do."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from tests.engine.checkpoint_files import same, written
from tests.engine.hostile_checkpoints import GOOD
from tests.engine.pickle_code import archive
from tests.mutations import encoded, picture
from tests.tiny_model import tiny_model
from utils.engine.checkpoint_reader import read_checkpoint

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 75587165\n"


def zipped(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, b"content")
    return file.getvalue()


def in_tar(kind):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=kind) as archive:
        archive.addfile(tarfile.TarInfo("a.pt"))
    return file.getvalue()


def good():
    file = io.BytesIO()
    torch.save({"model": tiny_model()}, file)
    return file.getvalue()


def torch_script():
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Conv2d(1, 1, 1), torch.ones(1, 1, 4, 4)), file)
    return file.getvalue()


def npz():
    file = io.BytesIO()
    np.savez(file, a=np.ones(3))
    return file.getvalue()


HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
KINDS = {
    "Git LFS": (LFS, "is a Git LFS pointer.*git lfs pull"),
    "Git LFS, CRLF": (LFS.replace(b"\n", b"\r\n"), "is a Git LFS pointer.*git lfs pull"),
    "Git LFS, BOM": (b"\xef\xbb\xbf" + LFS, "is a Git LFS pointer.*git lfs pull"),
    "Git LFS, old": (b"version https://hawser.github.com/spec/v1\noid sha256:4\n", "is a Git LFS pointer"),
    "html": (b"<!DOCTYPE html>\n<html><title>Not Found</title>", "is a web page .HTML.: the download failed"),
    "html after blanks": (b"\n\n  <HTML lang='en'>", "is a web page"),
    "html, UTF-16": ("<html><body>drive</body>".encode("utf-16"), "is a web page"),
    "html, BOM": (b"\xef\xbb\xbf<html>", "is a web page"),
    "html, cut": (b"<!doctype ht", "XML answer|web page"),
    "xhtml": (b'<?xml version="1.0"?><!DOCTYPE html PUBLIC ""><html>', "is a web page"),
    "html, letters": ("<html><title>Не найдено</title>".encode("cp1251") * 20, "is a web page"),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML answer.*AccessDenied"),
    "json": (b'{"message": "Not Found", "status": "404"}', "is a JSON text.*Not Found.*download failed"),
    "json list": (b'[{"error": "rate limit"}]', "is a JSON text"),
    "text": (b"404: Not Found", "is a text file that begins with '404: Not Found'"),
    "yaml": (b"nc: 80\nnames: [a, b]\n", "is a text file that begins with 'nc: 80"),
    "blanks": (b"\n\n  \n", "holds nothing but blanks"),
    "empty": (b"", "is empty"),
    "zeros": (bytes(100_000), "nothing but zeros"),
    "onnx": (b"\x08\x07\x12\x07pytorch\x1a\x052.4.0:\xe4\xbb\x01", "is an ONNX model"),
    "onnx, newer": (b"\x08\x0a\x12\x07pytorch\x1a\x052.9.0:\xe4", "is an ONNX model"),
    "safetensors": (struct.pack("<Q", len(HEADER)) + HEADER + bytes(4), "is a safetensors file"),
    "safetensors, padded": (struct.pack("<Q", len(HEADER) + 1) + b" " + HEADER + bytes(4), "is a safetensors file"),
    "git-annex": (b"/annex/objects/SHA256E-s75587165--4d7a.pt\n", "is a git-annex pointer.*git annex get"),
    "DVC": (b"outs:\n- md5: 4d7a\n  size: 12\n  path: yolov7.pt\n", "is a DVC pointer.*dvc pull"),
    "shortcut": (b"L\0\0\0\1\x14\2\0" + bytes(60), "is a Windows shortcut"),
    "alias": (b"book\0\0\0\0mark\0\0\0\0" + bytes(60), "is an alias of macOS"),
    "property list": (b"bplist00\xd1\1\2" + bytes(30), "is a property list"),
    "answer with headers": (b"HTTP/1.1 200 OK\r\n\r\nPK\3\4\0\0", "is an answer of a server"),
    "ExecuTorch": (b"\x1c\0\0\0ET12" + bytes(40), "is an ExecuTorch program"),
    "keras h5": (b"\x89HDF\r\n\x1a\n" + bytes(90), "is a Keras"),
    "keras": (zipped("metadata.json", "config.json", "model.weights.h5"), "is a Keras model"),
    "gzip": (gzip.compress(b"x" * 100), "is a gzip archive"),
    "bzip2": (in_tar("w:bz2"), "is a bzip2 archive"),
    "xz": (in_tar("w:xz"), "is an xz archive"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(20), "is a zstd archive"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + bytes(20), "is a 7z archive"),
    "rar": (b"Rar!\x1a\x07\x01\x00" + bytes(20), "is a rar archive"),
    "tar": (in_tar("w"), "is a tar archive"),
    "zip of a pt": (zipped("weights/yolov7.pt", "readme.txt"), "zip archive that holds 'weights/yolov7.pt': unpack it"),
    "zip of images": (zipped("coco/1.jpg", "coco/2.jpg"), "zip archive of other files, such as 'coco/1.jpg'"),
    "zip of nothing": (zipped(), "is an empty zip archive"),
    "npz": (npz(), "is a NumPy archive"),
    "npy": (b"\x93NUMPY\x01\x00" + bytes(50), "is a NumPy array"),
    "packed again": (zipped("last/data.pkl", "last/data/0", "last/version"), "compressed.*packed again"),
    "packed without folder": (zipped("data.pkl", "data/0", "version"), "no folder.*packed again"),
    "cut off": (good()[:-200], "is cut off"),
    "cut in half": (good()[: len(good()) // 2], "is cut off"),
    "only its beginning": (b"PK\3\4", "is cut off"),
    "TorchScript": (torch_script(), "is a TorchScript archive"),
    "darknet": (struct.pack("<3iq", 0, 2, 5, 32013312) + bytes(range(200)), "is a darknet"),
    "darknet, old": (struct.pack("<3ii", 0, 1, 0, 32013312) + bytes(range(200)), "is a darknet"),
    "TensorRT": (b"ftrt" + bytes(40), "is a TensorRT engine"),
    "TensorRT with json": (struct.pack("<L", 17) + b'{"stride": 32}   ' + b"ftrt", "is a TensorRT engine"),
    "TensorFlow Lite": (b"\x1c\0\0\0TFL3" + bytes(40), "is a TensorFlow Lite model"),
    "ncnn": (b"7767517\n186 217\n", "is an ncnn model"),
    "OpenVINO": (b'<?xml version="1.0"?>\n<net name="torch_jit" version="11">', "is an OpenVINO model"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(30), "is a GGUF model"),
    "side file of macOS": (b"\0\5\x16\7\0\2\0\0Mac OS X", "macOS"),
    "jpg": (encoded(".jpg", picture()), "is an image .JPEG."),
    "png": (encoded(".png", picture()), "is an image .PNG."),
    "tif": (encoded(".tif", picture()), "is an image .TIFF."),
    "webp": (encoded(".webp", picture()), "is an image"),
    "bmp": (encoded(".bmp", picture()), "is an image .BMP."),
    "mp4": (b"\0\0\0\x20ftypisom" + bytes(20), "is a film"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "is a PDF"),
    "program": (b"\x7fELF\2\1\1" + bytes(40), "is a program"),
    "pickle": (pickle.dumps({"w": [1.0]}, 2), "a pickle that torch.save has not written"),
    "pickle 4": (pickle.dumps({"w": [1.0]}, 4), "pickle protocol 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_what_it_is_is_said(name, tmp_path):
    content, message = KINDS[name]
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"weights.pt.*({message})") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_download_that_has_not_finished(tmp_path):
    path = tmp_path / "yolov7.pt.crdownload"
    path.write_bytes(bytes(5000))
    with pytest.raises(ValueError, match="crdownload.*has not finished"):
        read_checkpoint(path)
    path.write_bytes(good())
    assert read_checkpoint(path).model is not None, "the name alone is no fault"


def test_suffixes_tell_models_apart_that_begin_alike(tmp_path):
    for suffix, kind in ((".onnx", "an ONNX model"), (".mlmodel", "a CoreML model"), (".pb", "a TensorFlow model")):
        path = tmp_path / f"a{suffix}"
        path.write_bytes(b"\x08\x01\x12\x07pytorch")
        with pytest.raises(ValueError, match=kind):
            read_checkpoint(path)


def test_the_folder_that_a_pt_file_was_unpacked_to(tmp_path):
    folder = tmp_path / "last.pt"
    folder.mkdir()
    (folder / "data.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match="last.pt.*folder.*unpacked"):
        read_checkpoint(folder)


def test_another_protocol_of_torch_save_is_said(tmp_path):
    with pytest.raises(ValueError, match="file.pt was refused.*pickle protocol 4"):
        read_checkpoint(written({"model": {"w": torch.ones(1)}}, tmp_path, pickle_protocol=4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_model_of_an_old_torch(is_whole, tmp_path):
    """A whole model has the source of its classes in the file, which nobody reads."""
    model = tiny_model()
    content = {"model": model if is_whole else model.state_dict()}
    read = read_checkpoint(written(content, tmp_path, _use_new_zipfile_serialization=False)).model
    assert same(read.state, model.state_dict()) and read.yaml == (model.yaml if is_whole else None)


def test_one_bit_of_a_weight_is_another(tmp_path):
    path = written({"model": {"w": torch.arange(1000.0)}}, tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.tensor(500.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="file.pt .*is damaged, copy or download it again .*CRC.*data/0"):
        read_checkpoint(path)


def test_a_file_without_check_sums_is_read(tmp_path):
    options = torch.serialization
    if not hasattr(options, "set_crc32_options"):
        pytest.skip("this torch always writes them")
    options.set_crc32_options(False)
    try:
        path = written({"model": {"w": torch.arange(1000.0)}}, tmp_path)
    finally:
        options.set_crc32_options(True)
    assert read_checkpoint(path).model.state["w"].equal(torch.arange(1000.0))


def test_another_byte_order_is_said(tmp_path):
    path = tmp_path / "file.pt"
    path.write_bytes(archive(GOOD, more=[("a/byteorder", b"little")]))
    assert len(read_checkpoint(path).model.state) == 1
    path.write_bytes(archive(GOOD, more=[("a/byteorder", b"big")]))
    with pytest.raises(ValueError, match="file.pt.*byte order"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["a" * 5000 + ".pt", "a\nb.pt", "a/b.pt/c.pt"])
def test_odd_names_are_said_on_one_line(name, tmp_path):
    with pytest.raises(ValueError, match="no such checkpoint") as caught:
        read_checkpoint(tmp_path / name)
    assert "\n" not in str(caught.value)
