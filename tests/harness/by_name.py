"""Cases of a module that pytest's own process does not import, because it imports a framework.

    cases = CasesOf("tests.distributed.torch_cases")
    torch_pool.run(cases.checkpointed, problem=PROBLEM)

So collecting the tests needs no framework, and a platform that must be tested but is missing is an error of the pool,
not a module that skips itself.
"""


class CasesOf:
    """Each attribute is the name under which a rank finds that function of the module."""

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, function: str) -> str:
        return f"{self._module}:{function}"
