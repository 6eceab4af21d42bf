"""Which modules pass for Hugging Face's packed experts, how they are cut, and what is refused."""

import pytest

torch = pytest.importorskip("torch")

from hyper_parallel.core.expert_parallel.packed import packed_shapes, placements_of  # noqa: E402
from hyper_parallel.core.placement_types import Replicate, Shard  # noqa: E402
from hyper_parallel.platform.torch import PLATFORM  # noqa: E402

E, H, D = 4, 6, 5


class Experts(torch.nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in ({"gate_up_proj": (E, 2 * H, D), "down_proj": (E, D, H)} | shapes).items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


def shapes_of(module):
    return packed_shapes(PLATFORM, module, "Style")


def test_gate_and_up_are_cut_alike():
    shapes = shapes_of(Experts())
    assert (shapes.num_experts, shapes.hidden_dim, shapes.dim) == (E, H, D)
    assert shapes.cuts["gate_up_proj"].laid_out == (E, 2, H, D)
    assert placements_of(shapes, ("ep", "tp")) == {
        "gate_up_proj": (Shard(0), Shard(2)),
        "down_proj": (Shard(0), Shard(2)),
    }
    assert not shapes.swiglu  # nothing says that it is


def test_transposed_in_turns_with_biases():
    module = Experts(
        gate_up_proj=(E, D, 2 * H), down_proj=(E, H, D), gate_up_proj_bias=(E, 2 * H), down_proj_bias=(E, D)
    )
    module.is_transposed, module.is_concatenated, module.has_bias = True, False, True
    placements = placements_of(shapes_of(module), ("ep", "tp"))
    assert placements["gate_up_proj"] == (Shard(0), Shard(2)) and placements["down_proj"] == (Shard(0), Shard(1))
    assert placements["gate_up_proj_bias"] == (Shard(0), Shard(1))
    assert placements["down_proj_bias"] == (Shard(0), Replicate())
    assert all(cut.laid_out == cut.shape for cut in shapes_of(module).cuts.values())


@pytest.mark.parametrize(
    "shapes,words",
    [
        ({"scale": (E,)}, "scale"),
        ({"gate_up_proj_bias": (E, 2 * H)}, "gate_up_proj_bias"),
        ({"gate_up_proj": (E, D, 2 * H)}, "expected shapes"),
        ({"down_proj": (E - 1, D, H)}, "expected shapes"),
    ],
    ids=str,
)
def test_refusals(shapes, words):
    with pytest.raises(ValueError, match=words):
        shapes_of(Experts(**shapes))


def test_a_parameter_of_a_child_is_named():
    module = Experts()
    module.post_expert_norm = torch.nn.RMSNorm(D)
    with pytest.raises(ValueError, match=r"post_expert_norm\.weight"):
        shapes_of(module)


def test_another_call_is_refused():
    class OneInput(Experts):
        def forward(self, hidden_states):
            raise NotImplementedError

    with pytest.raises(ValueError, match="takes"):
        shapes_of(OneInput())


def test_other_modules_are_not_packed():
    assert shapes_of(torch.nn.Linear(2, 2)) is None
