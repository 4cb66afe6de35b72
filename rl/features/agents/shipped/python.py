"""Tool: Python programs in the sandbox (rl.sandbox): no network, no other files, limits on time and memory.

    agents: {tools: [rl.features.agents.shipped.python:python]}
    agents: {tools: [{function: rl.features.agents.shipped.python:python, kwargs: {wall_s: 5}}]}

Each call is a new process. For example, a variable of one call is unknown in the next call.
"""

from rl.sandbox.sandbox import ProgramLimits, run_program


def python(
    code: str,
    *,
    wall_s: float = 10.0,
    memory_mib: int = 512,
    interpreter: str | None = None,
    allow_unprotected: bool = False,
) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the whole program; it must print its results
    """
    limits = ProgramLimits(
        wall_s=wall_s, cpu_s=max(1, round(wall_s)), memory_mib=memory_mib, output_bytes=100_000
    )
    try:
        outcome = run_program(
            code, limits=limits, interpreter=interpreter, allow_unprotected=allow_unprotected
        )
    except ValueError as error:  # the machine cannot confine it, which is not the program's fault
        raise RuntimeError(str(error)) from error
    # The end of a traceback names the error.
    output = "\n".join(filter(None, (outcome.stdout.strip(), outcome.stderr.strip()[-2000:])))
    return outcome.report(output, f"ended at the limit of {outcome.end}")
