"""What the doctor says about machines, each given as the values that a probe would find."""

from argparse import Namespace

import pytest

from tools import doctor
from tools.doctor import GB, OK, SLOW, WRONG

BLACKWELL = ["sm_75", "sm_80", "sm_90", "sm_120"]


@pytest.mark.parametrize(
    ("row", "verdict", "words"),
    [
        (doctor.judge_driver("13.0", (13, 0), "580.65", True), OK, ""),
        (doctor.judge_driver("12.8", (13, 0), "580.65", True), OK, ""),
        (doctor.judge_driver("13.0", (12, 8), "570.1", False), WRONG, "cuda_max_good>=13.0"),
        (doctor.judge_driver("13.0", (13, 0), "580.65", False), WRONG, "CUDA_VISIBLE_DEVICES"),
        (doctor.judge_driver(None, (13, 0), "580.65", False), WRONG, "knows no GPU"),
        (doctor.judge_driver("13.0", None, "", False), SLOW, "runs on the CPU"),
        (doctor.judge_architecture("RTX 5090", (12, 0), BLACKWELL), OK, ""),
        (doctor.judge_architecture("RTX 4090", (8, 9), BLACKWELL), OK, ""),
        (doctor.judge_architecture("RTX 5090", (12, 0), ["sm_80", "sm_90"]), WRONG, "no kernels"),
        (doctor.judge_architecture("RTX 5090", (12, 0), ["sm_80", "sm_90", "compute_90"]), SLOW, "newer torch"),
        (doctor.judge_architecture("GTX 1080", (6, 1), BLACKWELL), WRONG, "no kernels"),
        (doctor.judge_gpu_memory(31 * GB, 32 * GB), OK, ""),
        (doctor.judge_gpu_memory(139 * GB, 140 * GB), OK, "--cache-images gpu: COCO fits on it at 320 px"),
        (doctor.judge_gpu_memory(20 * GB, 32 * GB), SLOW, "another program"),
        (doctor.judge_gpu_memory(8 * GB, 8 * GB), SLOW, "--batch-size -1"),
        (doctor.judge_cores(16, 128), OK, "--workers 16"),
        (doctor.judge_cores(2, 128), SLOW, "--workers 2 --cache-images gpu, or rent 16"),
        (doctor.judge_memory(None), OK, ""),
        (doctor.judge_memory(2 * GB), SLOW, "--workers 2"),
        (doctor.judge_memory(20 * GB), OK, "enough to train; to keep the images of COCO at hand, --cache-images disk"),
        (doctor.judge_memory(64 * GB), OK, "at 320 px"),
        (doctor.judge_memory(256 * GB), OK, "at 320 and 640 px"),
        (doctor.judge_shared_memory(64 * 10**6), SLOW, "--shm-size"),
        (doctor.judge_shared_memory(None), SLOW, "--fast"),
        (doctor.judge_shared_memory(16 * GB), OK, ""),
        (doctor.judge_disk(100 * GB, "."), OK, ""),
        (doctor.judge_disk(20 * GB, "."), SLOW, "60 GB"),
        (doctor.judge_disk(10**8, "."), WRONG, "make room"),
        (doctor.judge_pinned(None, True), OK, ""),
        (doctor.judge_pinned(8 * 10**6, None), OK, ""),
        (doctor.judge_pinned(8 * 10**6, False), SLOW, "memlock"),
        (doctor.judge_compiler("3.8.0", "/usr/bin/gcc", True, True), OK, ""),
        (doctor.judge_compiler("3.8.0", None, True, True), SLOW, "without a C compiler"),
        (doctor.judge_compiler("3.8.0", "/usr/bin/gcc", False, True), SLOW, "python3-dev"),
        (doctor.judge_compiler(None, None, False, False), OK, "with a GPU only"),
        (doctor.judge_version("numpy", "2.4.6"), OK, ""),
        (doctor.judge_version("numpy", "3.0.0"), OK, "newer than tested"),
        (doctor.judge_version("torch", "2.3.1+cu121"), WRONG, "requirements.txt"),
        (doctor.judge_version("cv2", None), WRONG, "requirements.txt"),
    ],
)
def test_verdicts(row, verdict, words):
    assert row.verdict == verdict and words in row.advice
    assert bool(row.advice) == bool(words), "advice where there is something to do"


def test_rates_are_the_smaller_of_gpu_and_cores(monkeypatch):
    monkeypatch.setattr(doctor.roofline, "rate", lambda *job: 3000.0)
    many, few = (list(doctor.expected_rates("NVIDIA GeForce RTX 5090", cores))[1:] for cores in (16, 2))
    assert len(many) == 4
    assert many[0] == ("yolov7-tiny 320 px batch 384", "3000", "10000", "1.1 h", "GPU", "5 (2)")
    assert few[0] == ("yolov7-tiny 320 px batch 384", "3000", "1250", "2.6 h", "cores", "5 (2)")
    assert many[3][4:] == ("cores", "19 (3)"), "640 px"
    assert list(doctor.expected_rates("Quadro K600", 2))[1][1] == "unknown"
    assert list(doctor.expected_rates(None, 2))[1][1] == "no GPU"
    lines = list(doctor.aligned(doctor.expected_rates("RTX 5090", 2)))
    assert len({line.index(limit) for line, limit in zip(lines[1:3], ("cores", "cores"), strict=True)}) == 1
    assert all(len(line) <= doctor.WIDTH for line in lines)


def test_a_long_row_goes_on_below_itself():
    long = doctor.judge_architecture("NVIDIA GeForce RTX 5090", (13, 0), [f"sm_{n}" for n in range(50, 121, 5)])
    lines = "\n".join(doctor.described(long)).splitlines()
    assert len(lines) > 3 and all(len(line) <= doctor.WIDTH for line in lines)
    assert lines[0].startswith("WRONG  architecture         NVIDIA GeForce RTX 5090, sm_130")
    assert " ".join(line.strip() for line in lines).endswith(f"-> {long.advice}")
    assert list(doctor.described(doctor.Row("memory", "unknown"))) == ["ok     memory               unknown"]


@pytest.mark.parametrize(("verdict", "status"), [(SLOW, 0), (WRONG, 1)])
def test_status(verdict, status, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "judge_disk", lambda *found: doctor.Row("disk", "full", verdict, "make room"))
    monkeypatch.setattr(doctor, "expected_rates", lambda *found: [("rates",)])
    with pytest.raises(SystemExit) as end:
        doctor.main(Namespace(folder=str(tmp_path)))
    out = capsys.readouterr().out
    row = f"{verdict:5}  disk                 full\n{'':7}-> make room\n"
    assert end.value.code == status and row in out
    assert ("Training is not possible: disk." in out) == (verdict == WRONG)
    assert len([line for line in out.splitlines() if line.startswith((OK, SLOW, WRONG))]) >= 9
    assert all(len(line) <= doctor.WIDTH for line in out.splitlines())


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file.*choose another --folder"):
        doctor.main(Namespace(folder=str(tmp_path / "file")))


def test_a_folder_that_is_not_there():
    with pytest.raises(OSError, match="missing"):
        doctor.main(Namespace(folder="missing"))
