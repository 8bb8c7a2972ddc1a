"""What ``doctor`` returns: the findings, worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cgkit.display import Shown
from cgkit.measuring.doctor.findings import FIELDS, SEVERITIES, Finding

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.measuring.doctor.patient import Patient


class Report(Shown):
    """The findings about one model, worst first.

    Attributes:
        model_name: the model's class.
        findings: all of them.
        not_checked: the checks that could not look, with the reason.
    """

    def __init__(self, patient: Patient, findings: Sequence[Finding], not_checked: dict[str, str]) -> None:
        self.patient = patient
        self.model_name = patient.name
        self.findings = sorted(dict.fromkeys(findings), key=lambda finding: finding.order)
        self.not_checked = not_checked

    @property
    def codes(self) -> list[str]:
        """The codes that occur, worst first."""
        return list(dict.fromkeys(finding.code for finding in self.findings))

    @property
    def ok(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return not (self.errors or self.of_severity("warning"))

    @property
    def errors(self) -> list[Finding]:
        """The findings of severity "error"."""
        return self.of_severity("error")

    def of_severity(self, severity: str) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity == severity]

    def of_code(self, code: str) -> list[Finding]:
        """The findings with one code."""
        return [finding for finding in self.findings if finding.code == code]

    def would_fail(self, *args: Any, **kwargs: Any) -> list[str]:
        """Which assumptions of the trace this new call breaks: each a sentence; [] if none.

        The no-guard dispatch drops the guards that would have noticed. What cgkit's own check of the arguments
        refuses is in the list too.

        Raises:
            CgkitError: the model could not be traced.
        """
        from cgkit.measuring.doctor.checks.dropped_guards import failing_assumptions

        return failing_assumptions(self.patient, args, kwargs)

    def guards_frame(self) -> pd.DataFrame:
        """One row a guard that the no-guard dispatch drops: ``source``, ``kind``, ``guard``, ``file``, ``line``."""
        import pandas as pd

        from cgkit.measuring.doctor.checks.dropped_guards import guard_rows

        return pd.DataFrame(guard_rows(self.patient), columns=["source", "kind", "guard", "file", "line"])

    def outside_frame(self) -> pd.DataFrame:
        """One row a tensor that the graph reads outside of its pool: ``source``, ``owner``, ``kind``, ``nbytes``,
        ``address`` (when doctor looked); ``alive`` and ``in_place`` (now: the owner still holds it there)."""
        import pandas as pd

        from cgkit.measuring.doctor.checks.outside_pool import outside_rows

        columns = ["source", "owner", "kind", "nbytes", "address", "alive", "in_place"]
        return pd.DataFrame(outside_rows(self.patient), columns=columns)

    def to_frame(self) -> pd.DataFrame:
        """One row a finding: ``code``, ``severity``, ``file``, ``line``, ``source``, ``what``, ``cost``, ``fix``,
        ``again``, ``command``, ``stack``, ``stream``, ``check``."""
        import pandas as pd

        return pd.DataFrame([finding.facts() for finding in self.findings], columns=list(FIELDS))

    def facts(self) -> dict[str, Any]:
        """The report as plain data, for ``--json``."""
        return {
            "model": self.model_name,
            "findings": [finding.facts() for finding in self.findings],
            "not_checked": self.not_checked,
        }

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __repr__(self) -> str:
        counts = [(len(self.of_severity(severity)), severity) for severity in SEVERITIES]
        said = ", ".join(f"{n} {name}{'s' * (n != 1 and name != 'info')}" for n, name in counts)
        lines = [f"doctor's report on {self.model_name}: {said}"]
        lines += ["  " + line for finding in self.findings for line in repr(finding).splitlines()]
        lines += [f"  not checked: {name} ({why})" for name, why in self.not_checked.items()]
        return "\n".join(lines)
