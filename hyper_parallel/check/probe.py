"""What is checked on: the platform with values on its device, and the groups of the mesh."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hyper_parallel.core.types import Mesh, Tensor
from hyper_parallel.platform.platform import Platform

__all__ = ["Axis", "Probe"]


@dataclass(frozen=True)
class Probe:
    """What is tested: the platform, and values on its device.

    Attributes:
        platform: the verbs. session: the module of that name of the platform. device_type: "cpu", "npu", ...
    """

    platform: Platform
    session: Any
    device_type: str

    def rows(self, values: npt.ArrayLike, width: int, dtype: str = "float32") -> Tensor:
        """[len(values), width]: each value fills a row. By default in float32, which every backend takes."""
        filled = np.repeat(np.asarray(values, np.float32)[:, None], width, axis=1)
        return self.session.tensor(filled, dtype, self.device_type)

    def int_tensor(self, values: npt.ArrayLike) -> Tensor:
        return self.session.tensor(np.asarray(values, np.int64), "int64", self.device_type)

    def array(self, tensor: Tensor) -> np.ndarray:
        return self.session.array(tensor)


@dataclass(frozen=True)
class Axis:
    """One group of the mesh, as seen from this rank.

    Attributes:
        name: of the mesh axis. mesh: the 1-D mesh.
        ranks: global ranks of the group, in its order. position: this rank's place among them.
    """

    name: str
    mesh: Mesh
    ranks: tuple[int, ...]
    position: int

    @property
    def rank(self) -> int:
        return self.ranks[self.position]
