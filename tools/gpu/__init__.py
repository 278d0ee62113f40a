"""The parts of `tools/gpu_suite.py`: what is checked and measured on a GPU, each part a function of a `Context`."""
