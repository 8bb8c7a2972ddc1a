"""Makes ``CLAIMS.md`` of the notebooks' outputs: ``python notebooks/claims.py`` (``make notebooks`` does, at its end).

Ends with 1 where a notebook that is there leaves out a claim that it should cover.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cgkit.claims import table  # noqa: E402 - the package beside this folder, installed or not


def main() -> int:
    (HERE / "CLAIMS.md").write_text(table.markdown(HERE), encoding="utf-8")
    missing, later = table.missing(HERE), table.still_open(HERE)
    print(f"CLAIMS.md: {len(table.records(HERE))} records; {len(later)} claims open, whose notebooks are not there")
    if missing:
        print(f"not covered: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
