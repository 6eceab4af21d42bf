"""The verbs that ``hyper_parallel.training`` asks of a framework, reached through ``Platform.gradients()``.

"Local" tensors are what this rank holds: a whole tensor, or its part of a parameter or gradient laid out over a mesh.
A group is whatever the platform's mesh returns from ``get_group``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hyper_parallel.core.types import Group, Module, Tensor

__all__ = ["GradientVerbs"]


class GradientVerbs(ABC):
    """Gradients and values of parameters, and sums of them over groups. None of it is differentiable."""

    @abstractmethod
    def trainable(self, module: Module) -> list[tuple[str, Tensor]]:
        """(name, parameter) of a module's parameters that require a gradient, in its order, each once."""

    @abstractmethod
    def local_gradients(self, parameters: Sequence[Tensor], grads: Sequence[Tensor] | None) -> list[Tensor | None]:
        """The local gradient of each parameter in the parameter's layout, or None.

        Raises:
            TypeError: the framework keeps gradients elsewhere. ValueError: numbers differ, or a gradient is sparse.
        """

    @abstractmethod
    def zero_gradient(self, parameter: Tensor) -> Tensor:
        """Give a parameter without gradient one of zeros; its local part."""

    @abstractmethod
    def with_gradients(self, local: Sequence[Tensor | None]) -> tuple[Tensor, ...] | None:
        """What is handed to the user: the new gradients, or None where they were changed in place."""

    @abstractmethod
    def local_values(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The local values of the parameters."""

    @abstractmethod
    def set_local_value(self, parameter: Tensor, value: Tensor) -> None:
        """Write the local value of a parameter in place."""

    @abstractmethod
    def zeros_like(self, tensor: Tensor) -> Tensor:
        """A new tensor of zeros."""

    @abstractmethod
    def same(self, first: Tensor, second: Tensor) -> bool:
        """Whether two local tensors hold the same numbers; NaN is the same as NaN."""

    @abstractmethod
    def ranks(self, group: Group) -> tuple[int, ...]:
        """Global ranks of a group, in order."""

    @abstractmethod
    def joint_group(self, ranks: Sequence[int], device_type: str) -> Group:
        """The group of these ranks, all of which ask for it; made once."""

    @abstractmethod
    def sum_flat(self, tensors: Sequence[Tensor], group: Group, divisor: int, name: str) -> list[Tensor]:
        """The tensors, of one dtype, summed over the group in one collective and divided by a number.

        They may be changed, and then are what comes back.
        """

    @abstractmethod
    def largest(self, values: Sequence[int], group: Group, device_type: str, name: str) -> list[int]:
        """The largest of each of a few ints over the group."""

    @abstractmethod
    def powers(self, pairs: Sequence[tuple[Tensor, Tensor | None]], norm_type: float, foreach: bool | None) -> Tensor:
        """Sum of ``|x| ** norm_type`` over all elements, or the largest ``|x|`` for infinity: a scalar, fp32 or wider.

        ``pairs`` are parameters and their local gradients; a missing gradient counts as zeros.
        """

    @abstractmethod
    def combine_scalars(self, scalars: Sequence[Tensor], group: Group, largest: bool, name: str) -> list[Tensor]:
        """Each scalar summed over the group, or its largest; one collective."""

    @abstractmethod
    def total_norm(self, powers: Sequence[Tensor], norm_type: float) -> Tensor:
        """The norm from its parts' ``powers``."""

    @abstractmethod
    def finite(self, tensors: Sequence[Tensor]) -> bool:
        """Whether no element is infinite or NaN. The host waits for the device."""

    @abstractmethod
    def clipped(self, local: Sequence[Tensor | None], norm: Tensor, max_norm: float) -> list[Tensor | None]:
        """Gradients times ``min(1, max_norm / (norm + 1e-6))``; they may be changed in place."""
