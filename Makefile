# make train   set up .venv, draw the embedded data set, train yolov7-tiny on it, print the result
# make test    set up .venv, run the test suite in two processes (TEST_PROCESSES=0: in one, for tests on a GPU)
# make lint    set up .venv, check style, format and types
# make doctor  set up .venv, look at this machine: what will be slow, what is impossible, which rates to expect
# make smoke   set up .venv, try training, resume, overfitting and precision in a few minutes, PASS or FAIL for each
# Any variable below can be given on the command line: make train EPOCHS=60 PYTHON=python3.12

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PIP_FLAGS ?=
TEST_PROCESSES ?= 2
PYTEST_FLAGS ?=

TRAIN_IMAGES ?= 480
VAL_IMAGES ?= 80
SIZE ?= 96
EPOCHS ?= 18
BATCH ?= 16
WORKERS ?= 2
TRAIN_FLAGS ?= --adam

# Threads that wait for work sleep instead of spinning: the loader's processes need the cores.
export OMP_WAIT_POLICY := PASSIVE

RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
EXPORT_INSTALLED := $(VENV)/installed-export
RESULT := runs/shapes/tiny

.PHONY: train test lint smoke doctor shapes
.DELETE_ON_ERROR:

train: shapes
	$(RUN) train.py --data data/shapes.yaml --hyp data/hyp.shapes.yaml --cfg cfg/training/yolov7-tiny.yaml \
	    --weights '' --img $(SIZE) $(SIZE) --batch-size $(BATCH) --epochs $(EPOCHS) --workers $(WORKERS) \
	    --project runs/shapes --name tiny --exist-ok $(TRAIN_FLAGS)
	@echo "images in $(RESULT): first look at results.png, test_batch0_pred.jpg, confusion_matrix.png"

# A file stays in one process, so that its tests share what they prepare; one thread for each process.
test: export OMP_NUM_THREADS := 1
test: $(EXPORT_INSTALLED)
	$(RUN) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(PYTEST_FLAGS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

smoke: $(INSTALLED)
	$(RUN) tools/smoke.py

doctor: $(INSTALLED)
	$(RUN) tools/doctor.py

shapes: $(INSTALLED)
	$(RUN) tools/make_shapes.py --out shapes --train $(TRAIN_IMAGES) --val $(VAL_IMAGES) --size $(SIZE) --seed 0

# The stamp is touched last: a set-up that was cut off is repeated, a finished one is not.
$(INSTALLED): requirements.txt
	@test -n "$(PYTHON)" || { echo "No python3 was found: install Python 3.10 or newer, or name it: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$(PYTHON) is missing or older than Python 3.10; name another one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments: ensurepip is missing (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install $(PIP_FLAGS) -r requirements.txt
	@touch $@

# What `export.py --include onnx` needs beside it; the tests try it.
$(EXPORT_INSTALLED): requirements-export.txt $(INSTALLED)
	$(RUN) -m pip install $(PIP_FLAGS) -r requirements-export.txt
	@touch $@
