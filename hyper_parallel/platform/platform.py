"""The verbs that ``core`` asks of a framework. One meaning on every platform, small, and complete.

Shapes: R rows, T tokens, K experts per token, E experts (of this call), D and N feature sizes, H hidden size,
P ranks of a group. A group is whatever the platform's mesh returns from ``get_group``.
``name`` arguments are words for error messages: what the collective is for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from hyper_parallel.core.placement_types import Placement
from hyper_parallel.core.types import Group, Mesh, Module, Tensor
from hyper_parallel.platform.gradients import GradientVerbs

__all__ = ["Arriving", "Platform"]


class Arriving(Protocol):
    """Integers on their way from the ranks of a group."""

    def wait(self) -> Tensor:
        """What arrived, in rank order and complete: the host may read it."""

    def to_host(self) -> list[list[int]]:
        """Values of each of ``also``, and of what arrived: one copy from the device.

        The host waits for nothing that was launched after the start.
        """


class Platform(ABC):
    """A framework, as ``core`` sees it."""

    name: str

    # Objects

    def owns(self, obj: Any) -> bool:
        """Whether ``obj`` is a module, tensor or mesh of this framework."""
        return self.is_module(obj) or self.is_tensor(obj) or self.is_mesh(obj)

    @abstractmethod
    def is_module(self, obj: Any) -> bool:
        """Whether ``obj`` is a module of this framework."""

    @abstractmethod
    def is_tensor(self, obj: Any) -> bool:
        """Whether ``obj`` is a tensor, no sparse one, that holds its own data: a sharded parameter's local value is, a
        DTensor is not."""

    @abstractmethod
    def is_mesh(self, obj: Any) -> bool:
        """Whether ``obj`` is a device mesh of this framework."""

    @abstractmethod
    def public_object(self, name: str) -> Any:
        """What a public name stands for: the classes GroupedExperts, MoE, FeedForward, TokenChoiceTopKRouter and
        DeviceMesh; ``ops_to_save``, where the framework can keep single operators in recomputation.

        Raises:
            AttributeError: the framework has no such thing, with words why.
        """

    # Modules

    @abstractmethod
    def parameters(self, module: Module) -> dict[str, Any]:
        """The module's own parameters by name, without those of its children."""

    @abstractmethod
    def buffers(self, module: Module) -> dict[str, Tensor]:
        """The module's own tensors that are no parameters, by name; empty where the framework knows none."""

    @abstractmethod
    def named_modules(self, module: Module) -> Iterable[tuple[str, Module]]:
        """Iterate ``(dotted name, module)`` over the module (name "") and everything inside it."""

    @abstractmethod
    def replaced_forward(self, module: Module) -> bool:
        """Whether forward was replaced on this one object, so that its class no longer says what it computes."""

    @abstractmethod
    def wrap_forward(self, module: Module, sharded: Any) -> Callable[[], None]:
        """Prepare that ``sharded(module, local_forward, *inputs, **keywords)`` runs whenever ``module`` is called.

        ``local_forward(*inputs)`` is the module's own forward, which finds local tensors under its parameters' names.
        Nothing of one call is kept on the module, deep copies work, and the class's name shows ``sharded.label``.
        For a module that is wrapped already, ``sharded`` takes the place of the earlier one.

        Returns:
            what makes the change, and cannot fail.

        Raises:
            TypeError: the module's class cannot be wrapped.
        """

    @abstractmethod
    def sharded(self, module: Module) -> Any:
        """The ``sharded`` of an earlier ``wrap_forward``, or None."""

    def casts_inputs(self, module: Module) -> bool:
        """Whether something around the module may cast the tensors among its inputs; it leaves other objects alone."""
        return False

    def packed_experts(self) -> Any:
        """The verbs of experts with packed weights (``core.expert_parallel.packed``), or None where there are none:

        ``shard(module, shapes, device_mesh, placements)`` lays the parameters out, ``placements`` by name;
        ``wrap(module, sharded)`` is :meth:`wrap_forward`, whose ``local_forward(rows_RD, counts_L, scores_R)`` is the
        experts of this rank. State dicts keep the names and shapes from before.
        """
        return None

    @abstractmethod
    def eagerly(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, which a compiler of the framework that traces the caller neither enters nor records.

        The one door to whatever reads counts on the host.
        """

    @abstractmethod
    def as_operator(self, module: Module, method: str, parts: Sequence[str], *inputs: Tensor) -> Tensor:
        """``module.method(*inputs)``, which a compiler of the framework that traces the caller records as one operator.

        Args:
            method: name of a method that gives a new tensor of the shape and dtype of the first input.
            parts: names of the children of ``module`` whose parameters the method uses.

        Gradients reach inputs and parameters. What the compiler cannot record is called as by :meth:`eagerly`.
        """

    # Meshes and layouts

    @abstractmethod
    def world_size(self, device_type: str) -> int:
        """Number of running ranks. Raises RuntimeError if communication for the device type is not initialised."""

    @abstractmethod
    def init_device_mesh(self, device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> Mesh:
        """Make the mesh and its groups; arguments are checked."""

    @abstractmethod
    def distribute_tensor(self, tensor: Tensor, device_mesh: Mesh, placements: Sequence[Placement]) -> Any:
        """Lay out the first rank's ``tensor``; ``placements`` are ours, checked, dims not negative."""

    @abstractmethod
    def distribute_module(
        self,
        module: Module,
        device_mesh: Mesh,
        partition_fn: Callable[[str, Module, Mesh], None] | None,
        input_fn: Callable[[Module, Any, Mesh], Any] | None,
        output_fn: Callable[[Module, Any, Mesh], Any] | None,
    ) -> Any:
        """See ``hyper_parallel.distribute_module``."""

    @abstractmethod
    def shard_parameter(self, module: Module, name: str, device_mesh: Mesh, placements: Sequence[Placement]) -> None:
        """Replace one parameter by its layout over the mesh; name, dtype and requires_grad stay."""

    @abstractmethod
    def add_parameter(
        self,
        module: Module,
        name: str,
        shape: tuple[int, ...],
        bound: float,
        like: Any,
        device_mesh: Mesh,
        placements: Sequence[Placement],
    ) -> None:
        """Give the module one more trainable parameter, laid out over the mesh: drawn from U(-bound, bound), zeros for
        a bound of 0; the first rank's draw counts. On the device of the sharded parameter ``like``, in its dtype, but
        in fp32 where that has 16 bits or fewer."""

    @abstractmethod
    def local(self, parameter: Any) -> Tensor:
        """This rank's part of a parameter, sharded or not, with the gradient that goes with it."""

    @abstractmethod
    def is_sharded(self, parameter: Any) -> bool:
        """Whether a parameter is already laid out over a mesh."""

    @abstractmethod
    def local_tokens(self, x: Any, device_mesh: Mesh, placement: Placement) -> tuple[Tensor, tuple[int, ...] | None]:
        """This rank's part of tokens that are laid out over a 1-D mesh, and the shape of the whole.

        A distributed tensor of the framework is brought to ``placement`` first. Of a tensor that holds its own data
        the shape of the whole is not known: None. Differentiable.
        """

    @abstractmethod
    def distributed_tokens(self, x: Tensor, device_mesh: Mesh, placement: Placement, shape: tuple[int, ...]) -> Any:
        """The distributed tensor of that shape whose part on this rank is x; differentiable.

        Raises:
            TypeError: the framework has no distributed tensor.
        """

    # Dtypes and devices

    @abstractmethod
    def dtype_name(self, value: Tensor) -> str:
        """The name of a tensor's dtype, or of a dtype, without the framework's: "float32". An object that is neither
        gives that of its type."""

    @abstractmethod
    def is_floating(self, value: Tensor) -> bool:
        """Whether a tensor's dtype, or a dtype of this framework, is a real floating one of 16 bits or more."""

    @abstractmethod
    def same_device(self, x: Tensor, weight: Tensor) -> bool:
        """Whether both have their numbers in one place; a tensor without memory is nowhere."""

    @abstractmethod
    def needs_gradient(self, x: Tensor) -> bool:
        """Whether a backward pass will come for x, as far as the framework can tell; else False."""

    # Integers, and where they are

    @abstractmethod
    def is_integer(self, tensor: Tensor) -> bool:
        """Whether the tensor's dtype is a signed or unsigned integer (not bool)."""

    @abstractmethod
    def on_host(self, tensor: Tensor) -> bool:
        """Whether reading the tensor's values costs no copy from a device."""

    @abstractmethod
    def to_host(self, *tensors: Tensor) -> list[list[int]]:
        """Values of 1-D integer tensors as lists of Python ints: one copy from the device for all of them."""

    @abstractmethod
    def int_tensor(self, values: npt.ArrayLike, like: Tensor) -> Tensor:
        """An int64 tensor of a numpy array or list of ints, on the device of ``like``.

        It remembers them: ``on_host`` is True of it, and ``to_host`` of it copies nothing from the device.
        """

    @abstractmethod
    def int_tensors(self, arrays: Sequence[Any], like: Tensor) -> list[Tensor]:
        """``int_tensor`` of each of several 1-D arrays, in one copy to the device."""

    @abstractmethod
    def made_by_host(self, tensor: Tensor) -> bool:
        """Whether ``int_tensor`` made the tensor."""

    # Rows. No verb changes its inputs; all are differentiable in their floating inputs.

    @abstractmethod
    def permute(self, x: Tensor, order_R: Tensor, inverse_R: Tensor, copies: int = 1) -> Tensor:
        """``y[i] = x[order[i] // copies]``: rows of x, each ``copies`` times, in the order of a permutation.

        Args:
            x: [R / copies, ...].
            order_R: int64 [R], a permutation.
            inverse_R: int64 [R], its inverse (``inverse[order[i]] = i``).

        Gradient: :meth:`unpermute` of it.
        """

    @abstractmethod
    def unpermute(self, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor, copies: int) -> Tensor:
        """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``, the rows that ``permute`` made of one: [T, D].

        Args:
            x_RD: R = T * copies rows.
            order_R, inverse_R: as ``permute`` had them.

        Gradient: :meth:`permute` of it.
        """

    @abstractmethod
    def index_select(self, x: Tensor, index_R: Tensor) -> Tensor:
        """``y[i] = x[index[i]]``, rows of x any number of times each. Gradient: :meth:`index_add` of it."""

    @abstractmethod
    def index_add(self, x: Tensor, index_R: Tensor, num_rows: int) -> Tensor:
        """``y[j]`` = sum of the rows i of x with ``index[i] = j``, of [num_rows, ...]. Gradient: selected again."""

    @abstractmethod
    def concat(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """Tensors one after another along a dim; differentiable."""

    @abstractmethod
    def swiglu_experts(
        self,
        x_RD: Tensor,
        w1_EHD: Tensor,
        w2_EDH: Tensor,
        w3_EHD: Tensor,
        num_tokens_per_expert_E: Tensor,
        scores_R: Tensor | None,
    ) -> Tensor:
        """``scores * w2[e](silu(w1[e] x) * (w3[e] x))`` for the rows of each expert e: [R, D].

        Inputs are checked and share a dtype (under the framework's autocast they are cast to its). ``scores_R`` may be
        None. An expert without rows gets a zero gradient, never a missing one.
        """

    @abstractmethod
    def grouped_linear(self, x_RD: Tensor, w_END: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """``y = x @ w[e].T`` for the rows of each expert e: [R, N], in the dtype of x (under autocast, in its).

        The weight is cast to that dtype, and gets a gradient in its own; zeros for an expert without rows.
        """

    @abstractmethod
    def add_products(self, w: Tensor, left_ENr: Tensor, right_ErK: Tensor, factor: float) -> Tensor:
        """``w[e] + factor * left[e] @ right[e]`` in the shape and dtype of w, which is [E, N, K] or splits N or K into
        two dims; differentiable."""

    @abstractmethod
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """``silu(gate) * up``."""

    @abstractmethod
    def same_dtype(self, x: Tensor, weight: Tensor) -> bool:
        """Whether a product of the two is defined: equal dtypes, or an autocast that makes them equal."""

    # Routing. Core also uses what both frameworks' tensors share: + - * /, comparison of shapes, .sum(dim),
    # .reshape(shape) and .sign().

    @abstractmethod
    def probabilities(self, logits_TE: Tensor, score_func: str) -> Tensor:
        """ "softmax" over the last dim or "sigmoid" of the logits, in fp32 or wider."""

    @abstractmethod
    def detach(self, x: Tensor) -> Tensor:
        """x, from which no gradient flows back."""

    @abstractmethod
    def top_indices(self, x_TE: Tensor, k: int) -> Tensor:
        """Indices int64 [T, k] of the k largest values along the last dim, largest first."""

    @abstractmethod
    def take_along(self, x_TE: Tensor, index_TK: Tensor) -> Tensor:
        """``y[t, k] = x[t, index[t, k]]``, differentiable."""

    @abstractmethod
    def multi_hot(self, index_TK: Tensor, size: int) -> Tensor:
        """[T, size], 1.0 at the indices of each row and 0.0 elsewhere, fp32."""

    @abstractmethod
    def nonzero(self, x: Tensor, num_nonzero: int) -> Tensor:
        """Positions int64 of the entries of a flat [N] that are not 0, ascending; ``num_nonzero`` is their number."""

    @abstractmethod
    def floor_divide(self, x: Tensor, divisor: int) -> Tensor:
        """``x // divisor`` of an int64 tensor without negative values, all below 2**31, and a positive int."""

    @abstractmethod
    def to_int(self, x: Tensor) -> Tensor:
        """Whole numbers of a float tensor as int64."""

    @abstractmethod
    def sort_by_expert(self, selected_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Stable order of the T*K routed rows by expert.

        Returns:
            order int64 [T*K], its inverse int64 [T*K], and the number of rows per expert int64 [E].
        """

    @abstractmethod
    def scale_rows(self, x_RD: Tensor, scores_R: Tensor) -> Tensor:
        """Rows times their scores, formed in the wider dtype, returned in that of x."""

    @abstractmethod
    def count_in_backward(self, x: Tensor, counter_E: Tensor, counts_E: Tensor) -> Tensor:
        """x. When a gradient flows back through it, ``counts_E`` are added to ``counter_E`` in place.

        Backward runs once per step, with or without recomputation of the forward, and never in evaluation.
        """

    @abstractmethod
    def assign(self, buffer: Tensor, value: Tensor) -> None:
        """Write ``value`` into a module's buffer in place, in the buffer's dtype."""

    # Collectives. Their inputs may be non-contiguous; outputs are fresh tensors.

    @abstractmethod
    def start_counts_exchange(self, counts: Tensor, group: Group, name: str, also: Sequence[Tensor] = ()) -> Arriving:
        """Start to send chunk r of ``counts`` (int64, equal chunks) to rank r of the group.

        Returns:
            what the ranks send here, in rank order. Its ``to_host()`` gives the values of ``also``, too. Nothing else
            may be asked of the group before it, or its ``wait()``. No gradient.
        """

    @abstractmethod
    def all_to_all_rows(
        self, x: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], group: Group, name: str
    ) -> Tensor:
        """Send ``send_splits[r]`` rows to rank r, receive ``recv_splits[r]`` rows from it, both in rank order.

        Gradient: the same exchange with the splits swapped.
        """

    @abstractmethod
    def copy_to_group(self, x: Tensor, group: Group, name: str, dtype: Any = None) -> Tensor:
        """Forward: x. Backward: the gradient summed over the group. For a value all ranks hold, used in parts.

        ``dtype`` is that of the sum's terms on their way, by default the gradient's.
        """

    @abstractmethod
    def reduce_from_group(self, x: Tensor, group: Group, name: str, dtype: Any = None) -> Tensor:
        """Forward: x summed over the group. Backward: the gradient as it is, for it is the same on every rank.

        ``dtype`` is that of the sum's terms on their way, by default that of x.
        """

    @abstractmethod
    def split_over_group(self, x: Tensor, splits: Sequence[int], group: Group, name: str) -> Tensor:
        """Forward: this rank's share of x, ``splits[r]`` rows for rank r. Backward: the shares' gradients, gathered.

        For a value that all ranks hold and of which each uses its share.
        """

    @abstractmethod
    def gather_from_group(self, x: Tensor, splits: Sequence[int], group: Group, name: str) -> Tensor:
        """Forward: the rows of all ranks, ``splits[r]`` from rank r. Backward: this rank's share of the gradient, which
        is the same on every rank."""

    @abstractmethod
    def gather_tokens(
        self, x: Tensor, splits: Sequence[int], group: Group, name: str, dtype: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Forward: the rows of all ranks, ``splits[r]`` from rank r, as two values that are equal: an all-gather.

        The first is for what every rank computes alike: its gradient is complete on every rank, and this rank's share
        of it goes back. The second is for what is cut over the group: its gradients are terms, of which each rank gets
        the sum of its share, by a reduce-scatter; ``dtype`` is theirs on their way, by default the gradient's.
        """

    @abstractmethod
    def scatter_tokens(
        self, terms: Tensor, complete: Tensor | None, splits: Sequence[int], group: Group, name: str, dtype: Any = None
    ) -> Tensor:
        """Forward: this rank's share of rows, ``splits[r]`` for rank r: the sum over the group of ``terms``, by a
        reduce-scatter, and of ``complete``, which is the same on every rank, once. Backward: the shares' gradients,
        gathered once, for both. ``dtype`` is that of the terms on their way, by default their own.
        """

    @abstractmethod
    def sum_over_group(self, x: Tensor, group: Group, name: str) -> Tensor:
        """x summed over the group, as a new tensor. No gradient."""

    @abstractmethod
    def digests(self, x: Tensor, group: Group, name: str) -> list[list[int]]:
        """A short list of integers per rank of the group, in rank order, that differ where the bits of the ranks' x
        do: a NaN equals itself. For checks: no gradient."""

    @abstractmethod
    def rows_with_nan(self, x: Tensor) -> list[int]:
        """Which rows of x hold a NaN. For checks: the host waits for the device."""

    # Training

    @abstractmethod
    def gradients(self) -> GradientVerbs:
        """The verbs of ``hyper_parallel.training``, described there."""
