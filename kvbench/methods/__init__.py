"""Compression methods, one formula in each file. The folders that KVBENCH_METHODS names hold further methods."""

import os

# these folders join the package's path: their files become modules kvbench.methods.NAME, like kvbench's own
__path__ += [os.path.abspath(folder) for folder in os.environ.get("KVBENCH_METHODS", "").split(os.pathsep) if folder]
