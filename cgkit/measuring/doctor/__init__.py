"""``cgkit.doctor``: what is wrong with a model, with the line, the reason and the way out.

Most of it is known to the stages already, which refuse what they cannot do with an error that says why. Here the
stages are tried one after the other, go on after a failure where that is possible, and what they say becomes a
list of findings. A check is a function in ``checks/`` that gets the patient and yields findings.
"""

from cgkit.measuring.doctor.examine import doctor
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.registry import CHECKS
from cgkit.measuring.doctor.report import Report

__all__ = ["CHECKS", "Finding", "Report", "doctor"]
