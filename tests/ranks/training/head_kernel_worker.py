"""Compare the log-prob head's Triton kernels with the torch functions that they replace, or compile them.

head_kernel_worker.py interpret      prints the errors of statistics, gradients and the whole head, as JSON;
                                         TRITON_INTERPRET=1 must be set
head_kernel_worker.py compile        compiles the kernels for Hopper; Triton needs no GPU for that
"""

import itertools
import json
import sys

import torch

from rl.training import head_kernels, logprobs
from rl.training.logprobs import FLOOR

TOKENS = 5
ROWS = (50, head_kernels.BLOCK, 9001)
"""Numbers of rows: less than a block, one block, and three blocks with a partly filled last one."""
DTYPES = (torch.float32, torch.bfloat16)


def case(rows: int, dtype: torch.dtype):
    """Return logits [TOKENS, rows] and targets [TOKENS]; two targets are on another rank.

    This rank has no row of one of the last two tokens' sampling masks, and the last 10 rows of the other.
    """
    generator = torch.Generator().manual_seed(rows)
    logits = (4 * torch.randn(TOKENS, rows, generator=generator)).to(dtype)
    logits[-2], logits[-1, :-10] = FLOOR, FLOOR
    targets = torch.randint(rows, (TOKENS,), generator=generator)
    targets[1::2], targets[-1] = -1, rows - 1
    return logits, targets


def statistics_error(rows, dtype, temperature, wanted) -> float:
    """Return the largest relative error; check that the output does not change outside its columns."""
    logits, targets = case(rows, dtype)
    outs = [torch.full((3 + sum(wanted), 3 * TOKENS), 7.0) for _ in range(2)]
    for module, out in zip((head_kernels, logprobs), outs):
        module.statistics(logits, temperature, targets, wanted, out[:, TOKENS : 2 * TOKENS])
    found, expected = outs
    return float(((found - expected).abs() / expected.abs().clamp(min=1e-30)).max())


def gradient_error(rows, dtype, temperature, of_entropy) -> float:
    """Return the largest error, relative to the element plus a millionth of the largest element."""
    logits, targets = case(rows, dtype)
    lse = (logits.float() / temperature).logsumexp(-1)
    lse[-2] = 0.0  # by the kept tokens of another rank
    upstream, entropy, of = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(1))
    given = (temperature, targets, lse, upstream, (entropy, of) if of_entropy else None)
    mine = logits.clone()
    found = head_kernels.gradient(mine, *given)
    assert found.data_ptr() == mine.data_ptr() and mine._version > 0
    expected = logprobs.gradient(logits.clone(), *given)
    assert found.dtype == expected.dtype == dtype
    scale = expected.abs().double()
    return float(((found.double() - expected.double()).abs() / (scale + 1e-6 * scale.max())).max())


def head_error(dtype, chunk) -> float:
    """Return the largest relative error of values and gradients of the whole head."""
    from tests.unit.training.test_logprobs import chunked, inputs

    group = torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)
    given = dict(temperature=0.7, vocab_size=50, group=group, chunk=chunk)
    expected = chunked(*inputs(rows=64, dtype=dtype), **given)
    logprobs._functions = lambda hidden: (head_kernels.statistics, head_kernels.gradient)
    found = chunked(*inputs(rows=64, dtype=dtype), **given)
    logprobs._functions = lambda hidden: (logprobs.statistics, logprobs.gradient)
    return max(float((a - b).double().norm() / b.double().norm()) for a, b in zip(found, expected))


def interpret() -> dict[str, dict[str, float]]:
    errors: dict[str, dict[str, float]] = {}
    for dtype in DTYPES:
        cases = list(itertools.product(ROWS, [dtype], (1.0, 0.7)))
        some = list(itertools.product((False, True), repeat=2))
        errors[str(dtype)] = {
            "statistics": max(statistics_error(*c, wanted) for c in cases for wanted in some),
            "gradient": max(gradient_error(*c, of_entropy) for c in cases for of_entropy in (False, True)),
            "head": max(head_error(dtype, chunk) for chunk in (3, 1000)),
        }
    return errors


def compile_all() -> int:
    """Compile all variants of the kernels; return their number."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {
        "rows": "i32",
        "row_stride": "i32",
        "out_stride": "i32",
        "temperature": "fp32",
        "targets": "*i64",
    }
    count = 0
    for kernel in (head_kernels._statistics, head_kernels._gradient):
        for dtype, flag in itertools.product(("bf16", "fp32"), (False, True)):
            constants = dict(SCALED=flag, ENTROPY=flag, SQUARES=flag, BLOCK=head_kernels.BLOCK)
            constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
            types = known | {"logits": f"*{dtype}"} | dict.fromkeys(constants, "constexpr")
            signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
            compiled = triton.compile(
                ASTSource(kernel, signature, constants),
                target=GPUTarget("cuda", 90, 32),
                options={"num_warps": head_kernels.WARPS},
            )
            assert compiled.asm["cubin"]
            count += 1
    return count


if __name__ == "__main__":
    print(json.dumps({"interpret": interpret, "compile": compile_all}[sys.argv[1]]()))
