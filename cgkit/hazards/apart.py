"""Exhibits in a process of their own: on a GPU an illegal address spoils the whole process, and that should be another.

``python -m cgkit.hazards.apart DEVICE`` reads ids from its input, a line each, and answers each with a line of JSON.
One such process serves many exhibits, since starting one takes some seconds. It ends itself after an exhibit that
raises, because CUDA may answer nothing from then on; the next exhibit gets a new one.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from cgkit.hazards.exhibit import Exhibit, Symptom, Visit

#: Seconds that an exhibit may take, the start of the process included.
TIMEOUT_S = 120.0


class Apart:
    """The process, started when it is first needed, and again after it has ended.

    Args:
        device: as :func:`cgkit.hazards.show`.
        command: what to start in place of this module (for tests).
        timeout_s: after so many seconds without an answer the process is ended.
    """

    def __init__(
        self, device: str, command: Sequence[str] | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.device, self.timeout_s = device, timeout_s
        self.command = list(command or [sys.executable, "-m", "cgkit.hazards.apart", device])
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def visit(self, exhibit: Exhibit) -> Visit:
        """The exhibit, run over there. A process that ends is its harm, and what it said last stands in the visit."""
        answer = self._ask(exhibit.id)
        if "error" in answer:
            self.close()
            gone = Symptom(True, f"its process ended: {answer['error']}")
            return Visit(exhibit, self.device, gone, "", Symptom(False, "not run"), "")
        return Visit(
            exhibit,
            self.device,
            Symptom(*answer["symptom"]),
            answer["says"],
            Symptom(*answer["fixed_symptom"]),
            answer["fixed_says"],
        )

    def _ask(self, id: str) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(self.timeout_s, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{id}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it is gone before it could be asked
            line = ""
        finally:
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        return {"error": f"status {process.wait()}, and no answer (at most {self.timeout_s:g} s are given)"}

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            root = str(Path(__file__).resolve().parents[2])
            path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
            )
        return self._process

    def close(self) -> None:
        """Ends the process; the next visit starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_processes: dict[str, Apart] = {}


def visit_apart(exhibit: Exhibit, device: str) -> Visit:
    """``exhibit`` in the process that this one keeps for ``device``."""
    return _processes.setdefault(device, Apart(device)).visit(exhibit)


def _serve(device: str, answers: TextIO) -> None:
    from cgkit import hazards

    for line in sys.stdin:
        try:
            visit = hazards.exhibit(line.strip()).run(device)
        except BaseException as error:
            said = str(error).strip().splitlines() or [""]
            answer: dict[str, Any] = {"error": f"{type(error).__name__}: {said[0]}"}
        else:
            names = ("symptom", "says", "fixed_symptom", "fixed_says")
            answer = {name: getattr(visit, name) for name in names}
        print(json.dumps(answer), file=answers, flush=True)
        if "error" in answer:
            return


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is no answer
    _serve(sys.argv[1], _answers)
