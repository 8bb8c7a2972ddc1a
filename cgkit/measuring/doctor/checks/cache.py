"""Will the next start find its compiled pieces on disk? If not, what the nearest key differs in."""

from __future__ import annotations

from collections.abc import Iterator

from cgkit.compiling.adaptors import make_adaptor
from cgkit.compiling.cache import cache_key, entries, why_miss
from cgkit.compiling.cache.folder import read_key
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check

#: So many differences are named.
_NAMED = 4


@check("cache-miss")
def cache(patient: Patient) -> Iterator[Finding]:
    """The factor to blame where pieces of this code are on disk under another key."""
    traced = patient.traced
    stored = [key for folder in entries() if (key := read_key(folder)) is not None]
    if traced is None or not stored:
        return
    devices = {entry.device for entry in traced.inputs if entry.device is not None}
    adaptor = make_adaptor(patient.config, devices)
    if not adaptor.saves:
        return
    key = cache_key(patient.config, traced.traced_files, devices, adaptor.settings(None))
    own = set(key.code)
    if own <= {"__main__", "__mp_main__"}:  # a script or a notebook: another one's code has the same name
        return
    if key in stored or not any(own == set(other.code) for other in stored):
        return  # found, or this code was never compiled: nothing to blame
    difference = why_miss(key)
    if difference is None or not difference.differences:
        return
    named = "; ".join(str(each).splitlines()[0] for each in difference.differences[:_NAMED])
    more = len(difference.differences) - _NAMED
    yield Finding(
        "cache-miss",
        "info",
        f"the next start compiles anew although pieces of this code are on disk: {named}"
        + (f"; and {more} more" if more > 0 else ""),
        "set it back if the change was not meant; else the new key is filled at the next start",
        again="cgkit.why_miss(compiled.cache_key)",
    )
