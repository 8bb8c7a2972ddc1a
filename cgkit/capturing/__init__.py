"""Stage 4: a callable becomes recorded graphs.

``capture(compiled, sizes) -> CapturedGraphs``: large sizes first, one pool, weak outputs, then the
lock. Below it: what is recorded and what is padded (:class:`CaptureSizes`), which graph a batch takes
(:class:`CudagraphDispatcher`), what records and replays (:class:`CUDAGraphWrapper`), and the two
platforms, CUDA and emulated. ``README.md`` in this folder is the short tour.
"""

from __future__ import annotations

from cgkit.capturing.addresses import WeightLedger as WeightLedger
from cgkit.capturing.capture import capture as capture
from cgkit.capturing.captured import CapturedGraphs as CapturedGraphs
from cgkit.capturing.captured import device_of as device_of
from cgkit.capturing.captured import free_all as free_all
from cgkit.capturing.dispatcher import CudagraphDispatcher as CudagraphDispatcher
from cgkit.capturing.dispatcher import Route as Route
from cgkit.capturing.ledgers import Ledgers as Ledgers
from cgkit.capturing.modes import ModeResolution as ModeResolution
from cgkit.capturing.modes import resolutions_frame as resolutions_frame
from cgkit.capturing.modes import resolve_cudagraph_mode as resolve_cudagraph_mode
from cgkit.capturing.plans import ReplayPlans as ReplayPlans
from cgkit.capturing.platform import GraphPlatform as GraphPlatform
from cgkit.capturing.platform import RecordedGraph as RecordedGraph
from cgkit.capturing.platform import get_platform as get_platform
from cgkit.capturing.pool_bytes import PoolBytes as PoolBytes
from cgkit.capturing.sizes import CaptureSizes as CaptureSizes
from cgkit.capturing.sizes import check_compile_sizes as check_compile_sizes
from cgkit.capturing.sizes import ladder as ladder
from cgkit.capturing.static_inputs import StaticInputs as StaticInputs
from cgkit.capturing.wrapper import CUDAGraphOptions as CUDAGraphOptions
from cgkit.capturing.wrapper import CUDAGraphWrapper as CUDAGraphWrapper
