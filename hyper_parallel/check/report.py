"""Bringing the findings of all ranks together, and printing them on rank 0."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.check.probe import Axis, Probe
from hyper_parallel.core.types import Tensor

__all__ = ["Finding", "Report"]

RIGHT, WRONG = 1.0, 2.0


@dataclass(frozen=True)
class Finding:
    """What this rank found in one check. ``number`` is shown if ``is_error``; else it must be the same on all ranks."""

    title: str
    right: bool
    number: float = 0.0
    is_error: bool = False


class Report:
    """Brings the findings of all ranks together, and prints them on rank 0."""

    def __init__(self, probe: Probe, everyone: Axis) -> None:
        self._probe, self._everyone = probe, everyone

    def say(self, *lines: str) -> None:
        if self._everyone.position == 0:
            print("\n".join(lines), flush=True)

    def show(self, title: str, findings: Sequence[Finding]) -> bool:
        """Print a table; whether every rank found everything right. Every rank gets the same answer."""
        rights, numbers, arrived = self.exchange(findings)
        self.say("", title)
        for check, finding in enumerate(findings):
            right, number = rights[:, check], numbers[:, check]
            if not finding.is_error:
                right = right & (number == number[0])
            wrong = np.flatnonzero(arrived & ~right)
            result = "ok" if len(wrong) == 0 else f"WRONG on {_in_words(wrong)}"
            if finding.is_error:
                result = f"{number[arrived].max(initial=0):.1e}  {result}"
            self.say(f"  {finding.title:<40}{result}")
            rights[:, check] = right
        if not arrived.all():
            self.say(f"  what {_in_words(np.flatnonzero(~arrived))} found did not arrive")
        return bool(arrived.all() and rights.all())

    def exchange(self, findings: Sequence[Finding]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What all ranks found: whether right [P, C], numbers [P, C], and whether a rank's findings arrived [P].

        The collectives that carry the findings are those under test. So they go two ways, and a row counts only if it
        says whose it is and holds nothing but verdicts: zeros or another rank's row are no findings.
        """
        place, num_ranks, group = self._everyone.position, len(self._everyone.ranks), self._everyone.mesh.get_group()
        verdicts = [RIGHT if finding.right else WRONG for finding in findings]
        own = np.asarray([1.0 + place, *verdicts, *(finding.number for finding in findings)], np.float32)
        one_of_all = np.zeros((num_ranks, len(own)), np.float32)
        one_of_all[place] = own
        ones = (1,) * num_ranks
        platform = self._probe.platform
        summed = platform.sum_over_group(self._tensor(one_of_all), group, "check: sum of the findings")
        sent = platform.all_to_all_rows(
            self._tensor(np.tile(own, (num_ranks, 1))), ones, ones, group, "check: all-to-all of the findings"
        )
        rows = np.zeros((num_ranks, len(own)))
        arrived = np.zeros(num_ranks, bool)
        for way in (summed, sent):
            values = self._probe.array(way)
            judged = np.isin(values[:, 1 : 1 + len(findings)], (RIGHT, WRONG)).all(axis=1)
            valid = (values[:, 0] == 1 + np.arange(num_ranks)) & judged
            rows[valid & ~arrived] = values[valid & ~arrived]
            arrived |= valid
        return rows[:, 1 : 1 + len(findings)] == RIGHT, rows[:, 1 + len(findings) :], arrived

    def _tensor(self, values: np.ndarray) -> Tensor:
        return self._probe.session.tensor(values, "float32", self._probe.device_type)


def _in_words(ranks: np.ndarray) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(str(rank) for rank in ranks)}"
