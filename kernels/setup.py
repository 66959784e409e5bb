"""Compile the C functions. They are called through ctypes, so that the library holds nothing of Python."""

from setuptools import Extension, setup

# -Wno-psabi: functions that pass vectors are inlined, so that no convention for passing them matters
FLAGS = ["-O3", "-fno-math-errno", "-Wall", "-Wno-psabi"]

setup(ext_modules=[Extension("kvbench_kernels._packed", ["kvbench_kernels/packed.c"], extra_compile_args=FLAGS)])
