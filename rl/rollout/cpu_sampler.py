"""The sampler of the CPU engine, vectorised over the rows of a batch.

vLLM's CPU sampler steps one torch.Generator per request in a Python loop, draws a Gumbel number per
vocabulary entry and row, and computes the rank of the sampled token. This sampler draws one number per row.
On CUDA the sampler is not replaced, because vLLM hashes seed and position in a kernel there.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from rl.rollout.inversion import invert, uniforms
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class HashedSampler(Sampler):
    """Samples each token from a hash of the request's seed (`extra_args["seed"]`) and the token's position.

    A sample depends neither on the other requests of its batch, nor on the replica, nor on preemptions. A
    request has no torch.Generator, because vLLM steps the generator back after a chunk of a prompt, and a
    CPU generator cannot step back.

    Replaces `sampler` of vLLM's GPUModelRunner. For another version of vLLM, compare `_draw` with
    TopKTopPSampler.forward_cpu and `gather_logprobs` with Sampler's.

    Args:
        runner: vLLM's model runner, which holds the seeds and positions of the rows.
    """

    log_softmax = staticmethod(functools.partial(torch.log_softmax, dim=-1))

    def __init__(self, runner: "GPUModelRunner") -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self._runner = runner
        replace_attribute(self.topk_topp_sampler, "forward", self._draw)
        self.masks: dict[str, dict[int, np.ndarray]] | None = None
        """Sampling mask of each token, by request (vLLM's internal id) and the token's position: the sorted
        ids of the tokens that it was sampled from. None: masks are not recorded."""

    def _draw(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sampled tokens, int64 [B], and the log-probs of the sampling distribution, [B, V].

        logits: float32 [B, V] after temperature and min_p. The caller ignores the tokens of greedy requests.
        """
        assert not generators, (
            "requests must pass their seed in extra_args['seed'], not in SamplingParams.seed"
        )
        logprobs = self.log_softmax(apply_top_k_top_p(logits, k, p))
        names, positions = self._rows()
        seeds = np.array([self._seed(name) for name in names], np.uint64)
        if self.masks is not None:
            self._record(self.masks, logprobs, names, positions)
        return invert(logprobs, torch.from_numpy(uniforms(seeds, positions))), logprobs

    def _seed(self, name: str) -> int:
        params = self._runner.requests[name].sampling_params
        assert params is not None and params.extra_args is not None
        return params.extra_args["seed"]

    def _rows(self) -> tuple[list[str], np.ndarray]:
        """Return the request of each row of the logits, and the number of tokens before the row's token."""
        batch = self._runner.input_batch
        return batch.req_ids, batch.num_tokens_no_spec[: len(batch.req_ids)]

    @staticmethod
    def _record(
        masks: dict[str, dict[int, np.ndarray]], logprobs: Tensor, names: list[str], positions: np.ndarray
    ) -> None:
        """Store the sampling mask of each row. A token that is drawn again replaces its entry.

        vLLM also draws a token after each chunk of a prompt and ignores this token. Its position is that of
        the first token of the response, whose entry therefore replaces it later.
        """
        row, token = (logprobs > -torch.inf).nonzero(as_tuple=True)
        ends = row.bincount(minlength=len(names)).cumsum(0)[:-1].numpy()
        for name, position, ids in zip(names, positions.tolist(), np.split(token.int().numpy(), ends)):
            masks.setdefault(name, {})[position] = ids

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Return the log-probs of `token_ids`, int64 [B]. Their ranks are 0: nothing reads them."""
        assert num_logprobs == 0, (
            f"num_logprobs={num_logprobs} must be 0: only the sampled token's log-prob is returned"
        )
        tokens = token_ids.unsqueeze(-1)
        return LogprobsTensors(tokens.int(), logprobs.gather(-1, tokens), torch.zeros_like(token_ids))
