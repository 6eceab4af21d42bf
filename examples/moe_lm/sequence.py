"""Where a model cuts its tokens over tp along the sequence: everywhere but within attention, which sees all of them."""

import hyper_parallel as hp

__all__ = ["CutOverTp", "Whole"]


class Whole:
    """The sequence is not cut."""

    def __init__(self, sequence):
        self.positions = slice(0, sequence)

    def gather(self, x_BSD):
        return x_BSD

    split = gather


class CutOverTp:
    """Each rank of tp holds its part of the sequence."""

    def __init__(self, mesh, sequence):
        rank, size = mesh.get_local_rank("tp"), mesh["tp"].size()
        self.group, part = mesh.get_group("tp"), sequence // size
        self.splits = (part,) * size
        self.positions = slice(rank * part, (rank + 1) * part)

    def gather(self, x_BSD):
        """The whole sequence. Its gradient is complete on every rank, so that each takes back its part."""
        return self._along_sequence(hp.get_platform(x_BSD).gather_from_group, x_BSD)

    def split(self, x_BSD):
        """This rank's part of a sequence that every rank holds. The parts' gradients are gathered."""
        return self._along_sequence(hp.get_platform(x_BSD).split_over_group, x_BSD)

    def _along_sequence(self, verb, x_BSD):
        batch, _, dim = x_BSD.shape
        x_SBD = verb(x_BSD.swapaxes(0, 1).reshape(-1, batch * dim), self.splits, self.group, "sequence parallel")
        return x_SBD.reshape(-1, batch, dim).swapaxes(0, 1)
