"""The formats in which rows are stored and attended while decoding.

``registry`` stores each row in the first format that takes it. ``format`` has the interface of a format, and each
``*_rows`` module is one. ``attend``, ``split`` and ``kernels`` compute attention over stored tokens: in plain PyTorch,
by PyTorch's fused function on a CPU, and by Triton on a GPU.
"""
