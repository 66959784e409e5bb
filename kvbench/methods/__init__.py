"""Compression methods, a formula a file; those in folders that KVBENCH_METHODS names stand beside kvbench's own."""

import os

__path__ += [os.path.abspath(folder) for folder in os.environ.get("KVBENCH_METHODS", "").split(os.pathsep) if folder]
