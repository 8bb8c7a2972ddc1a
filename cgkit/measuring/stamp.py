"""Where and with what something was run, in one line: the last cell of every notebook."""

from __future__ import annotations

import datetime
import os
import platform

import torch


def stamp() -> str:
    """Device, versions and date: ``run on cpu (2 cores), torch 2.13.0, Python 3.11.7, cgkit 0.1.0, 2026-11-30``.

    Where more is running than there are cores, it says so: times are then longer than they would be.
    """
    import cgkit

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({os.cpu_count()} cores)"
    load = os.getloadavg()[1] if hasattr(os, "getloadavg") else 0.0
    busy = f", shared with other work (load {load:.1f})" if load > (os.cpu_count() or 1) else ""
    return (
        f"run on {device}, torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}, "
        f"cgkit {cgkit.__version__}, {datetime.date.today()}{busy}"
    )
