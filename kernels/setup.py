"""Compile the C functions. They are called through ctypes, so that the library holds nothing of Python."""

from setuptools import Extension, setup

# sums may be reordered, so that they use vector instructions; numbers near zero stay as they are
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-Wall"]

setup(ext_modules=[Extension("kvbench_kernels._packed", ["kvbench_kernels/packed.c"], extra_compile_args=FLAGS)])
