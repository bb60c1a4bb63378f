"""What a file is that was given for weights and is none: its first bytes tell, and what can be done about it."""

import json
import re
import string
import struct

from utils.engine.torch_file import open_archive

AGAIN = "download it again"
GIVE_PT = "a .pt file of this project or of stock YOLOv7 is needed"
UNPACK = "unpack it and give the .pt file in it"
# By their first bytes.
MAGIC = [
    (b"\x89HDF\r\n\x1a\n", f"a Keras (HDF5) file: {GIVE_PT}"),
    (b"\x1f\x8b", f"a gzip archive: {UNPACK}"),
    (b"BZh", f"a bzip2 archive: {UNPACK}"),
    (b"\xfd7zXZ\0", f"an xz archive: {UNPACK}"),
    (b"(\xb5/\xfd", f"a zstd archive: {UNPACK}"),
    (b"\x04\x22\x4d\x18", f"an lz4 archive: {UNPACK}"),
    (b"7z\xbc\xaf\x27\x1c", f"a 7z archive: {UNPACK}"),
    (b"Rar!\x1a\x07", f"a rar archive: {UNPACK}"),
    (b"PK\5\6", f"an empty zip archive: {AGAIN}"),
    (b"ftrt", f"a TensorRT engine, which holds no weights that can be read back: {GIVE_PT}"),
    (b"ptrt", f"a TensorRT engine, which holds no weights that can be read back: {GIVE_PT}"),
    (b"GGUF", f"a GGUF model: {GIVE_PT}"),
    (b"\x93NUMPY", f"a NumPy array: {GIVE_PT}"),
    (b"\0\5\x16\7", "the side file (._NAME) that macOS puts beside a file: give the file without ._"),
    (b"\xff\xd8\xff", f"an image (JPEG): {GIVE_PT}"),
    (b"\x89PNG", f"an image (PNG): {GIVE_PT}"),
    (b"GIF8", f"an image (GIF): {GIVE_PT}"),
    (b"II*\0", f"an image (TIFF): {GIVE_PT}"),
    (b"MM\0*", f"an image (TIFF): {GIVE_PT}"),
    (b"RIFF", f"an image, a sound or a film: {GIVE_PT}"),
    (b"BM", f"an image (BMP): {GIVE_PT}"),
    (b"%PDF", f"a PDF document: {GIVE_PT}"),
    (b"\x7fELF", f"a program: {GIVE_PT}"),
    (b"MZ", f"a program: {GIVE_PT}"),
    (b"L\0\0\0\1\x14\2\0", "a Windows shortcut: give the file that it stands for"),
    (b"book\0\0\0\0mark", "an alias of macOS: give the file that it stands for"),
    (b"bplist0", f"a property list of macOS: {GIVE_PT}"),
    (b"HTTP/1.", f"an answer of a server with its headers: the download failed, {AGAIN}"),
    (b"SQLite format 3", f"a database: {GIVE_PT}"),
]  # fmt: skip
ONNX_FIELDS = (0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42)  # those that follow ir_version in a ModelProto
DARKNET_VERSIONS = ((0, 1, 0), (0, 2, 0), (0, 2, 5))
TEXT = frozenset(map(ord, string.printable))
UNFINISHED = (".crdownload", ".part", ".partial", ".download", ".tmp")


def foreign_kind(path):
    """What the file at `path` is, and what to do, as the end of a sentence; None when it may be a .pt file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4096)
        if not size:
            return f"is empty: the download or the copy failed, {AGAIN}"
        kind = _of_zip(file) if start.startswith(b"PK\3\4") else _of_start(start, size, path.suffix.lower())
    if kind and path.suffix.lower() in UNFINISHED:
        kind += f" (the ending {path.suffix} is that of a download that has not finished)"
    return kind


def _of_start(start, size, suffix):
    if not start.strip(b"\0"):
        return f"begins with nothing but zeros: a download that did not finish, {AGAIN}"
    for magic, kind in MAGIC:
        if start.startswith(magic):
            return f"is {kind}"
    if start[4:8] == b"TFL3":
        return f"is a TensorFlow Lite model: {GIVE_PT}"
    if start[4:6] == b"ET" and start[6:8].isdigit():
        return f"is an ExecuTorch program: {GIVE_PT}"
    if start[4:8] == b"ftyp":
        return f"is a film or an image (HEIC): {GIVE_PT}"
    if start[257:262] == b"ustar":
        return (
            "was refused, nothing of it was run: it is a tar archive; if a .pt file is in it, unpack it and give that"
        )
    if len(start) >= 12 and struct.unpack_from("<3i", start) in DARKNET_VERSIONS:
        return f"is a darknet .weights file: {GIVE_PT}"
    if start[8:].lstrip(b" ")[:2] == b'{"' and 0 < struct.unpack_from("<Q", start)[0] <= size - 8:
        return f"is a safetensors file: {GIVE_PT}"
    if start[4:6] == b'{"' and 0 < struct.unpack_from("<L", start)[0] <= size - 4:
        return f"is a TensorRT engine with its description: {GIVE_PT}"
    if len(start) > 2 and start[0] == 8 and start[1] < 32 and start[2] in ONNX_FIELDS:
        other = {".mlmodel": "a CoreML model", ".pb": "a TensorFlow model"}.get(suffix, "an ONNX model")
        return f"is {other}: {GIVE_PT}, what was exported cannot be read back"
    return _of_text(_decoded(start))


def _decoded(start):
    """The first characters of a text file; None when it is none."""
    for mark, encoding in ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8-sig")):
        if start.startswith(mark):
            return start[: len(start) // 2 * 2].decode(encoding, "replace").strip()
    if not all(byte in TEXT or byte >= 128 for byte in start):
        return None
    return start.decode("utf-8", "replace").strip()


def _of_text(text):
    if text is None:
        return None
    low, shown = text[:1000].lower(), " ".join(text[:80].split())
    if not text:
        return f"holds nothing but blanks: the download or the copy failed, {AGAIN}"
    if re.match(r"version https?://(git-lfs|hawser)\.github\.com", low):
        return "is a Git LFS pointer, not the weights: fetch them with git lfs pull"
    if re.match(r"<(!doctype html|html|head|body|script|meta|title|!--)", low) or "<html" in low:
        return f"is a web page (HTML): the download failed, {AGAIN} from the page's own link to the file"
    if low.startswith("<"):
        kind = "an OpenVINO model" if "<net" in low else f"an XML answer of a server ({shown}): the download failed"
        return f"is {kind}: {GIVE_PT}"
    if low[0] in "{[" and _looks_like_json(text):
        return f"is a JSON text, such as the answer of a server ({shown}): the download failed, {AGAIN}"
    if low.startswith("7767517"):
        return f"is an ncnn model: {GIVE_PT}"
    if low.startswith("/annex/objects/"):
        return "is a git-annex pointer, not the weights: fetch them with git annex get"
    if re.search(r"^\s*-? ?md5: ", low, re.MULTILINE) and "outs:" in low:
        return "is a DVC pointer, not the weights: fetch them with dvc pull"
    return f"is a text file that begins with {shown!r}: {GIVE_PT}"


def _looks_like_json(text):
    try:
        json.loads(text)
    except ValueError as error:
        return "Expecting value" not in str(error) or len(text) > 1000
    except RecursionError:
        return True
    return True


def _of_zip(file):
    """What a zip archive is that torch.save has not written."""
    names = open_archive(file).namelist()
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        return "is a TorchScript archive (torch.jit.save): its weights are part of a program; " + GIVE_PT
    if any(name.endswith("data.pkl") and name.count("/") < 2 for name in names):
        return None
    if "model.weights.h5" in names:
        return f"is a Keras model: {GIVE_PT}"
    if any(name.endswith(".npy") for name in names):
        return f"is a NumPy archive (npz): {GIVE_PT}"
    inside = [name for name in names if name.lower().endswith((".pt", ".pth"))]
    if inside:
        return f"is a zip archive that holds {inside[0][:100]!r}: unpack it and give that file"
    example = f", such as {names[0][:100]!r}" if names else ""
    return f"is a zip archive of other files{example}: {GIVE_PT}"
