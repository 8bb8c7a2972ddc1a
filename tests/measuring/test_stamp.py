"""The line that says where something was run."""

import os
import re

import torch

from cgkit.measuring.stamp import stamp


def test_it_names_device_versions_and_date_and_says_when_the_machine_is_shared(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert re.fullmatch(r"run on .+, torch [\d.]+\w*, Python [\d.]+, cgkit [\d.]+, \d{4}-\d\d-\d\d", stamp())
    assert torch.__version__.split("+")[0] in stamp()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 1000.0, 0.0))
    assert stamp().endswith("shared with other work (load 1000.0)")
