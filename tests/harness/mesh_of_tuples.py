"""A mesh for rank arithmetic alone."""

from hyper_parallel.core.device_mesh import DeviceMesh


class MeshOfTuples(DeviceMesh):
    """A mesh without process groups: a group is the tuple of its ranks."""

    def _make_group(self, ranks):
        return tuple(ranks)
