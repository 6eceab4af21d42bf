"""The verbs that ``core`` asks of a framework. One meaning on every platform, small, and complete.

Shapes: R rows, T tokens, K experts per token, E experts (of this call), D and N feature sizes, H hidden size,
P ranks of a group. A group is whatever the platform's mesh returns from ``get_group``.
``name`` arguments are words for error messages: what the collective is for.
"""

from abc import ABC, abstractmethod

__all__ = ["Platform"]


class Platform(ABC):
    """A framework, as ``core`` sees it."""

    name: str

    # Objects

    def owns(self, obj) -> bool:
        """Whether ``obj`` is a module, tensor or mesh of this framework."""
        return self.is_module(obj) or self.is_tensor(obj) or self.is_mesh(obj)

    @abstractmethod
    def is_module(self, obj) -> bool:
        """Whether ``obj`` is a module of this framework."""

    @abstractmethod
    def is_tensor(self, obj) -> bool:
        """Whether ``obj`` is a tensor that holds its own data (a sharded parameter's local value is; a DTensor not)."""

    @abstractmethod
    def is_mesh(self, obj) -> bool:
        """Whether ``obj`` is a device mesh of this framework."""

    @abstractmethod
    def public_class(self, name):
        """The framework's class behind a public name: GroupedExperts, MoE, FeedForward, TokenChoiceTopKRouter,
        DeviceMesh."""

    # Modules

    @abstractmethod
    def parameters(self, module) -> dict:
        """The module's own parameters by name, without those of its children."""

    @abstractmethod
    def named_modules(self, module):
        """Iterate ``(dotted name, module)`` over the module (name "") and everything inside it."""

    @abstractmethod
    def replaced_forward(self, module) -> bool:
        """Whether forward was replaced on this one object, so that its class no longer says what it computes."""

    @abstractmethod
    def wrap_forward(self, module, sharded):
        """Run ``sharded(module, local_forward, *inputs, **keywords)`` whenever ``module`` is called.

        ``local_forward(*inputs)`` is the module's own forward, which finds local tensors under its parameters' names.
        Nothing of one call is kept on the module, deep copies work, and the class's name shows ``sharded.label``.
        For a module that is wrapped already, ``sharded`` takes the place of the earlier one.
        """

    @abstractmethod
    def sharded(self, module):
        """The ``sharded`` of an earlier ``wrap_forward``, or None."""

    @abstractmethod
    def eagerly(self, function, *args):
        """``function(*args)``, which a compiler of the framework that traces the caller neither enters nor records.

        The one door to whatever reads counts on the host.
        """

    @abstractmethod
    def as_operator(self, module, method, parts, *inputs):
        """``module.method(*inputs)``, which a compiler of the framework that traces the caller records as one operator.

        Args:
            method: name of a method that gives a new tensor of the shape and dtype of the first input.
            parts: names of the children of ``module`` whose parameters the method uses.

        Gradients reach inputs and parameters. What the compiler cannot record is called as by :meth:`eagerly`.
        """

    # Meshes and layouts

    @abstractmethod
    def world_size(self, device_type) -> int:
        """Number of running ranks. Raises RuntimeError if communication for the device type is not initialised."""

    @abstractmethod
    def init_device_mesh(self, device_type, shape, names):
        """Make the mesh and its groups; arguments are checked."""

    @abstractmethod
    def distribute_tensor(self, tensor, device_mesh, placements):
        """Lay out the first rank's ``tensor``; ``placements`` are ours, checked, dims not negative."""

    @abstractmethod
    def distribute_module(self, module, device_mesh, partition_fn, input_fn, output_fn):
        """See ``hyper_parallel.distribute_module``."""

    @abstractmethod
    def shard_parameter(self, module, name, device_mesh, placements):
        """Replace one parameter by its layout over the mesh; name, dtype and requires_grad stay."""

    @abstractmethod
    def is_sharded(self, parameter) -> bool:
        """Whether a parameter is already laid out over a mesh."""

    # Integers, and where they are

    @abstractmethod
    def is_integer(self, tensor) -> bool:
        """Whether the tensor's dtype is a signed or unsigned integer (not bool)."""

    @abstractmethod
    def on_host(self, tensor) -> bool:
        """Whether reading the tensor's values costs no copy from a device."""

    @abstractmethod
    def to_host(self, *tensors) -> list:
        """Values of 1-D integer tensors as lists of Python ints: one copy from the device for all of them."""

    @abstractmethod
    def int_tensor(self, values, like):
        """An int64 tensor of a numpy array or list of ints, on the device of ``like``.

        It remembers them: ``on_host`` is True of it, and ``to_host`` of it copies nothing from the device.
        """

    @abstractmethod
    def made_by_host(self, tensor) -> bool:
        """Whether ``int_tensor`` made the tensor."""

    # Rows. No verb changes its inputs; all are differentiable in their floating inputs.

    @abstractmethod
    def permute(self, x, order_R, inverse_R, copies=1):
        """``y[i] = x[order[i] // copies]``: rows of x, each ``copies`` times, in the order of a permutation.

        Args:
            x: [R / copies, ...].
            order_R: int64 [R], a permutation.
            inverse_R: int64 [R], its inverse (``inverse[order[i]] = i``).

        Gradient: :meth:`unpermute` of it.
        """

    @abstractmethod
    def unpermute(self, x_RD, order_R, inverse_R, copies):
        """``y[t]`` = sum over k of ``x[inverse[t * copies + k]]``, the rows that ``permute`` made of one: [T, D].

        Args:
            x_RD: R = T * copies rows.
            order_R, inverse_R: as ``permute`` had them.

        Gradient: :meth:`permute` of it.
        """

    @abstractmethod
    def index_select(self, x, index_R):
        """``y[i] = x[index[i]]``, rows of x any number of times each. Gradient: :meth:`index_add` of it."""

    @abstractmethod
    def index_add(self, x, index_R, num_rows):
        """``y[j]`` = sum of the rows i of x with ``index[i] = j``, of [num_rows, ...]. Gradient: selected again."""

    @abstractmethod
    def concat(self, tensors, dim):
        """Tensors one after another along a dim; differentiable."""

    @abstractmethod
    def swiglu_experts(self, x_RD, w1_EHD, w2_EDH, w3_EHD, num_tokens_per_expert_E, scores_R):
        """``scores * w2[e](silu(w1[e] x) * (w3[e] x))`` for the rows of each expert e: [R, D].

        Inputs are checked and share a dtype (under the framework's autocast they are cast to its). ``scores_R`` may be
        None. An expert without rows gets a zero gradient, never a missing one.
        """

    @abstractmethod
    def swiglu(self, gate, up):
        """``silu(gate) * up``."""

    @abstractmethod
    def same_dtype(self, x, weight) -> bool:
        """Whether a product of the two is defined: equal dtypes, or an autocast that makes them equal."""

    # Routing. Core also uses what both frameworks' tensors share: + - * /, comparison of shapes, .sum(dim),
    # .reshape(shape) and .sign().

    @abstractmethod
    def probabilities(self, logits_TE, score_func):
        """ "softmax" over the last dim or "sigmoid" of the logits, in fp32 or wider."""

    @abstractmethod
    def detach(self, x):
        """x, from which no gradient flows back."""

    @abstractmethod
    def top_indices(self, x_TE, k):
        """Indices int64 [T, k] of the k largest values along the last dim, largest first."""

    @abstractmethod
    def take_along(self, x_TE, index_TK):
        """``y[t, k] = x[t, index[t, k]]``, differentiable."""

    @abstractmethod
    def multi_hot(self, index_TK, size):
        """[T, size], 1.0 at the indices of each row and 0.0 elsewhere, fp32."""

    @abstractmethod
    def nonzero(self, x, num_nonzero):
        """Positions int64 of the entries of a flat [N] that are not 0, ascending; ``num_nonzero`` is their number."""

    @abstractmethod
    def to_int(self, x):
        """Whole numbers of a float tensor as int64."""

    @abstractmethod
    def sort_by_expert(self, selected_TK, num_experts):
        """Stable order of the T*K routed rows by expert.

        Returns:
            order int64 [T*K], its inverse int64 [T*K], and the number of rows per expert int64 [E].
        """

    @abstractmethod
    def scale_rows(self, x_RD, scores_R):
        """Rows times their scores, formed in the wider dtype, returned in that of x."""

    @abstractmethod
    def count_in_backward(self, x, counter_E, counts_E):
        """x. When a gradient flows back through it, ``counts_E`` are added to ``counter_E`` in place.

        Backward runs once per step, with or without recomputation of the forward, and never in evaluation.
        """

    @abstractmethod
    def assign(self, buffer, value):
        """Write ``value`` into a module's buffer in place, in the buffer's dtype."""

    # Collectives. Their inputs may be non-contiguous; outputs are fresh tensors.

    @abstractmethod
    def start_counts_exchange(self, counts, group, name):
        """Start to send chunk r of ``counts`` (int64, equal chunks) to rank r of the group.

        Returns:
            An object whose ``wait()`` gives what the ranks sent here, in rank order, complete: the host may read it.
            Nothing else may be asked of the group before. No gradient.
        """

    @abstractmethod
    def all_to_all_rows(self, x, send_splits, recv_splits, group, name):
        """Send ``send_splits[r]`` rows to rank r, receive ``recv_splits[r]`` rows from it, both in rank order.

        Gradient: the same exchange with the splits swapped.
        """

    @abstractmethod
    def copy_to_group(self, x, group, name, dtype=None):
        """Forward: x. Backward: the gradient summed over the group. For a value all ranks hold, used in parts.

        ``dtype`` is that of the sum's terms on their way, by default the gradient's.
        """

    @abstractmethod
    def reduce_from_group(self, x, group, name, dtype=None):
        """Forward: x summed over the group. Backward: the gradient as it is, for it is the same on every rank.

        ``dtype`` is that of the sum's terms on their way, by default that of x.
        """

    @abstractmethod
    def split_over_group(self, x, splits, group, name):
        """Forward: this rank's share of x, ``splits[r]`` rows for rank r. Backward: the shares' gradients, gathered.

        For a value that all ranks hold and of which each uses its share.
        """

    @abstractmethod
    def gather_from_group(self, x, splits, group, name):
        """Forward: the rows of all ranks, ``splits[r]`` from rank r. Backward: this rank's share of the gradient, which
        is the same on every rank."""

    @abstractmethod
    def sum_over_group(self, x, group, name):
        """x summed over the group, as a new tensor. No gradient."""

    @abstractmethod
    def digests(self, x, group, name) -> list:
        """A short list of floats per rank of the group, in rank order, that differ where the ranks' x differ. For
        checks: no gradient."""
