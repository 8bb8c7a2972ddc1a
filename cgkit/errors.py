"""The errors that cgkit raises on purpose.

Every message names the cause, the value that was seen and the way out. Catch
:class:`CgkitError` for all of them; each is also the builtin that a reader would expect
(a bad configuration is a ``ValueError``).
"""

from __future__ import annotations


class CgkitError(Exception):
    """Base of every error that cgkit raises on purpose."""


class ConfigError(CgkitError, ValueError):
    """A field of the configuration has a value that cannot be honoured."""


class TraceError(CgkitError, RuntimeError):
    """Dynamo could not turn the model into one graph, or a call does not fit the trace."""


class BufferWriteError(TraceError):
    """The model writes a tensor that it keeps (buffer or attribute) inside ``forward``."""


class SplitError(CgkitError, ValueError):
    """The graph cannot be cut as asked (for instance an operator that it does not hold)."""


class CutRegionError(SplitError):
    """A cut would take a region of a mode (autocast) apart."""


class CompileError(CgkitError, RuntimeError):
    """A piece could not be compiled."""


class CaptureError(CgkitError, RuntimeError):
    """A graph could not be recorded."""


class CaptureLockedError(CaptureError):
    """Something would be recorded or compiled after the capture lock was set."""


class CaptureOutOfMemoryError(CaptureError):
    """Memory ran out while recording; what had been recorded was freed."""


class HostReadError(CaptureError):
    """Code that is being recorded reads a tensor's value on the host (``.item()`` and the like)."""


class ReplayError(CgkitError, RuntimeError):
    """A recorded graph cannot be replayed as called."""


class MovedInputError(ReplayError):
    """An input of a recorded graph lies at another address than when it was recorded."""


class DroppedGuardError(TraceError):
    """With ``debug=True``: a call breaks an assumption of the trace, which then computes something else."""


class OverwrittenOutputError(ReplayError):
    """With ``debug=True``: a result is read after a later replay has overwritten it."""


class _LocatedError(ReplayError):
    """An error that knows where on the road it belongs: ``stage``, ``piece``, ``operator`` ("" where unknown)."""

    def __init__(self, message: str, stage: str = "", piece: str = "", operator: str = "") -> None:
        super().__init__(message)
        self.stage, self.piece, self.operator = stage, piece, operator


class DamagedBufferError(_LocatedError):
    """With ``debug=True``: memory was written that no step may write (beside a buffer, a live value)."""


class WrongReplayError(_LocatedError):
    """With ``debug=True``: a replay gives something else than the eager piece.

    Attributes:
        stage: "compiled" (the callable is wrong), "recorded" (the recording is) or "replayed" (only this replay is).
        piece: the first piece that differs.
        operator: the first operator in it that differs, or "" where that cannot be told.
    """


class WrongResultError(CgkitError, RuntimeError):
    """With ``debug=True``: a call of a model gives something else than the model's own ``forward``."""


class UnsupportedTorchError(CgkitError, RuntimeError):
    """A private hook of torch is not what it was on the versions that cgkit was run on."""


class RecordingError(CgkitError, LookupError):
    """A recording is not there, or cannot be read as what it is said to be."""


class ServingError(CgkitError, ValueError):
    """A request or a model cannot be served as asked."""


class TimelineError(CgkitError, ValueError):
    """A trace cannot be read, or it does not hold what was asked for."""
