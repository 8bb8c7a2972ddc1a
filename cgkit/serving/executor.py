"""STUB for level 0 until stages merge."""

from typing import Any
from cgkit.config import CUDAGraphMode


class Executor:
    def __init__(self, model, config):
        self.forward = model
        self.largest_size = 1

    def pad(self, n):
        return n

    def route(self, n, uniform):
        return CUDAGraphMode.NONE, None, n
