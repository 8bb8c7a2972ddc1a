"""Where and with what something was run, in one line: the last cell of every notebook."""

from __future__ import annotations

import datetime
import os
import platform

import torch


def stamp() -> str:
    """Device, versions and date: ``run on cpu (2 cores), torch 2.13.0, Python 3.11.7, cgkit 0.1.0, 2026-11-30``."""
    import cgkit

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({os.cpu_count()} cores)"
    return (
        f"run on {device}, torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}, "
        f"cgkit {cgkit.__version__}, {datetime.date.today()}"
    )
