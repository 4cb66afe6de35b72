"""Generation with vLLM alone, as its documentation shows: what Lockstep's generation is compared with."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any


def generations(
    *,
    model: str,
    prompts: list[list[int]],
    samples: int,
    max_tokens: int,
    seeded: bool = False,
    wait: Callable[[int], None] = lambda turn: None,
    **options: Any,
) -> Iterator[tuple[int, float]]:
    """Yield the sampled tokens and the seconds of each generation, without end.

    On a CPU vLLM runs in this process and without compilation, as in Lockstep's ranks.

    Args:
        prompts: token ids of prompts of equal length.
        samples: samples per prompt.
        seeded: whether each sample is a request with its own seed, as a reproducible run needs them.
        wait: called with the number of a generation, from 1 on, before it begins.
        options: further arguments of `LLM`.
    """
    import torch

    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    if not torch.cuda.is_available():
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
        options["enforce_eager"] = True
    from vllm import LLM, SamplingParams

    from rl.rollout.sampling import seed_of

    common = dict(temperature=1.0, max_tokens=max_tokens, logprobs=0, detokenize=False)
    llm = LLM(model, max_model_len=len(prompts[0]) + max_tokens, **options)
    turn = 0
    while True:
        turn += 1
        if seeded:
            requests = [{"prompt_token_ids": ids} for ids in prompts for _ in range(samples)]
            params = [
                SamplingParams(seed=seed_of(turn, place, place % samples), **common)
                for place in range(len(requests))
            ]
        else:
            requests = [{"prompt_token_ids": ids} for ids in prompts]
            params = [SamplingParams(n=samples, **common)] * len(prompts)
        wait(turn)
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        yield sum(len(sample.token_ids) for output in outputs for sample in output.outputs), seconds
