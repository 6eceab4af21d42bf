"""Which part of a step's batch a rank trains on."""

__all__ = ["Place"]


class Place:
    """This rank's place among those that share out the batch, and, where the sequence is cut over tp, its positions.

    Attributes:
        batch_axes: the mesh's axes whose ranks see different sequences. loss_axes: those whose losses add up.
    """

    def __init__(self, settings, mesh, arrangement):
        self.num_parts = arrangement.accumulation
        self.number, self.num_places = 0, arrangement.dp * arrangement.ep
        self.positions = slice(0, settings.sequence)
        self.batch_axes = self.loss_axes = () if mesh is None else ("dp", "ep")
        if mesh is not None:
            self.number = mesh.get_local_rank("dp") * arrangement.ep + mesh.get_local_rank("ep")
        if arrangement.sequence_parallel:
            length, tp_rank = settings.sequence // arrangement.tp, mesh.get_local_rank("tp")
            self.positions = slice(tp_rank * length, (tp_rank + 1) * length)
            self.loss_axes = ("dp", "ep", "tp")

    def micro_batches(self, *sequences):
        """This rank's part of arrays [batch, characters], as tuples of the arrays' micro-batches."""
        own = (array.reshape(self.num_places, self.num_parts, -1, array.shape[1])[self.number] for array in sequences)
        return list(zip(*(array[:, :, self.positions] for array in own)))
