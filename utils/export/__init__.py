"""Models as files for other runtimes: ONNX Runtime, TensorRT, OpenCV, LibTorch. `export.py` is the command.

Read in this order: outputs (what a file computes), writers (how it is written), compare (each file is run, and held
against the PyTorch model on images). The packages of requirements-export.txt are imported inside of functions only.
"""
