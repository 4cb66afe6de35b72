"""Draft tokens: a small model or head proposes tokens, and one engine step verifies them (`rollout.draft`).

    draft model or head -> K proposed tokens -> one step of the policy over K + 1 tokens -> 1 to K + 1 tokens

Samples are distributed as without drafts; on the CPU they are the same (`rl.rollout.cpu_drafts`), on CUDA
vLLM's rejection sampler draws them. A draft model is frozen: its weights are read once, and compared with
their checksums before every generation. The weights of the policy's own head are written by the refit.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rl.config.adapter import Adapter
from rl.config.draft import Draft
from rl.config.schema import Config
from rl.features.drafts.check import LIMIT, NUM_TOKENS, TOP_K, chi_square, deviate, num_test_samples
from rl.models import read_hf_config
from rl.models.mtp import HEADS
from rl.rollout.parts import EnginePart
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.vllm_model import DERIVED, derive_weights, register
from rl.runtime.checksum import bit_sum
from rl.runtime.collectives import sum_over_world
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from rl.rollout.engine import RolloutEngine

TRIAL = 512
"""Number of verifications of a generation after which drafts may end."""


class WrongDistribution(RuntimeError):
    """Raised if the engine samples from another distribution with drafts than without."""


class Drafts(EnginePart):
    """Lets an engine verify proposed tokens, and ends drafting in a generation in which it does not pay.

    Subclasses choose the proposer. Drafting pays if a step yields more than 1 + K * (parameters of the
    proposer) / (parameters of the policy) tokens: for example, 4 drafts of a model of 1/20 of the policy's
    size must yield 1.2 tokens per step. `rollout.draft.min_tokens_per_step` replaces this bound.
    """

    def __init__(self, draft: Draft):
        self.draft = draft
        self._is_checked = False
        self._counts = np.zeros((2, draft.tokens), np.int64)
        """Drafts verified, and drafts accepted, by position, in the last call of `RolloutEngine.run`."""

    def speculation(self, engine: "RolloutEngine") -> dict:
        """Return the options of vLLM's SpeculativeConfig that select the proposer."""
        raise NotImplementedError

    def options(self, engine: "RolloutEngine") -> dict:
        speculation = self.speculation(engine) | {
            "num_speculative_tokens": self.draft.tokens,
            "draft_tensor_parallel_size": engine.tp,
        }
        return engine.platform.draft_options(engine, speculation) | {"async_scheduling": False}

    def built(self, engine: "RolloutEngine") -> None:
        drafter = engine.platform.drafter(engine)
        of_policy = {id(parameter) for parameter in engine.model.parameters()}
        self._own = {n: p for n, p in drafter.model.named_parameters() if id(p) not in of_policy}
        """The proposer's parameters, without parameters that it shares with the policy."""
        sizes = [sum(p.numel() for p in each) for each in (self._own.values(), engine.model.parameters())]
        self._required = self.draft.min_tokens_per_step or 1 + self.draft.tokens * sizes[0] / sizes[1]
        engine.platform.verify_drafts(engine)
        replace_attribute(engine.scheduler, "make_spec_decoding_stats", self._count)

    def check(self, engine: "RolloutEngine", prompt: np.ndarray, num_samples: int) -> None:
        """Test once per process, with the first weights, that drafts do not change the distribution.

        Raises WrongDistribution on every rank.
        """
        if self._is_checked:
            return
        self._is_checked = True
        own = engine.config
        length = min(NUM_TOKENS, own.max_response_tokens)
        number = num_test_samples(num_samples * own.max_response_tokens // engine.num_replicas)
        sampling = Sampling(number, length, own.temperature, own.top_p, TOP_K)
        seeds = [seed_of("draft check", replica) for replica in range(engine.num_replicas)]
        required, self._required = self._required, 0.0  # drafts go on in the whole test
        samples = engine.generate([prompt] * engine.num_replicas, sampling, seeds)
        self._required = required
        assert samples is not None, "nothing interrupts the test"
        found = ((sample.token_ids, sample.segments[0].logprobs) for sample in samples)
        values = chi_square(found, top_k=TOP_K)
        statistic, freedom = sum_over_world(torch.tensor(values).double(), engine.device.torch).tolist()
        if (value := deviate(statistic, int(freedom))) > LIMIT:
            raise WrongDistribution(
                f"draft check: with {self.draft.setting} the engine samples from another distribution than "
                f"its log-probs say (chi-square {statistic:.0f} with {freedom:.0f} degrees of freedom, "
                f"{value:.1f} standard deviations); leave out {self.draft.setting}."
            )

    def begin(self, engine: "RolloutEngine") -> None:
        self._engine, self._is_on = engine, True
        self._counts = np.zeros_like(self._counts)
        engine.platform.switch_drafts(engine, on=True)

    def _count(
        self,
        stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> None:
        """Count the drafts of one verification; replaces `make_spec_decoding_stats` of vLLM's scheduler."""
        self._counts[0, :num_draft_tokens] += 1
        self._counts[1, :num_accepted_tokens] += 1
        # Counts are identical on all ranks of a replica, so they end drafting in the same step.
        if self._counts[0, 0] == TRIAL and 1 + self._counts[1].sum() / TRIAL < self._required:
            self._is_on = False
            self._engine.platform.switch_drafts(self._engine, on=False)

    def metrics(self, engine: "RolloutEngine") -> dict[str, float]:
        mine = torch.from_numpy(self._counts * engine.leads).double()
        verified, accepted = sum_over_world(mine, engine.device.torch).tolist()
        if not verified[0]:
            return {}
        of_position = {
            f"perf/draft_acceptance/{i + 1}": hits / count
            for i, (hits, count) in enumerate(zip(accepted, verified))
            if count
        }
        per_step = 1 + sum(accepted) / verified[0]
        return of_position | {"perf/draft_tokens_per_step": per_step, "perf/drafts_on": float(self._is_on)}


class DraftModel(Drafts):
    """A small model of its own proposes the tokens."""

    _kept: dict[str, torch.Tensor] = {}
    """Weights and buffers of the draft model in host memory; on a CPU the model's own."""

    def speculation(self, engine: "RolloutEngine") -> dict:
        register(read_hf_config(self.draft.path)["architectures"])
        return {"method": "draft_model", "model": self.draft.path}

    def built(self, engine: "RolloutEngine") -> None:
        from vllm.config import set_current_vllm_config
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader import get_model_loader

        super().built(engine)
        drafter = engine.platform.drafter(engine)
        model, config = drafter.model, drafter.speculative_config.draft_model_config
        # vLLM loads the draft model in the policy's `load_format`, and reads no weights then.
        with set_current_vllm_config(engine.llm.llm_engine.vllm_config):
            get_model_loader(LoadConfig()).load_weights(model, config)
        derive_weights(model)
        self._tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self._kept = {name: tensor.detach().cpu() for name, tensor in self._tensors.items()}
        self._checksums = self._sums()

    def begin(self, engine: "RolloutEngine") -> None:
        assert self._sums() == self._checksums, f"rollout.draft.path={self.draft.path}: its weights changed"
        super().begin(engine)

    def _sums(self) -> list[int]:
        """Return the checksums of the draft model's weights and buffers."""
        return torch.stack([bit_sum(tensor) for tensor in self._tensors.values()]).tolist()

    def wake(self, engine: "RolloutEngine", what: str) -> None:
        if what == "weights":  # vLLM's sleep mode has discarded them
            for name, tensor in self._tensors.items():
                tensor.detach().copy_(self._kept[name])


class HeadDrafts(Drafts):
    """The head for multi-token prediction of the policy's checkpoint proposes the tokens.

    It shares embedding and output head with the policy. The refit writes its other weights and compares them.
    """

    def speculation(self, engine: "RolloutEngine") -> dict:
        register([HEADS[engine.hf["architectures"][0]]])
        return {"method": "mtp"}

    def weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights | {n: p for n, p in self._own.items() if n.rpartition(".")[2] not in DERIVED}

    def weights_changed(self, engine: "RolloutEngine") -> None:
        model = engine.platform.drafter(engine).model
        derive_weights(model)
        engine.platform.weights_written(model)


SOURCES = {"model": DraftModel, "mtp": HeadDrafts}
"""`rollout.draft.method` -> part of the engine."""


def parts(config: Config, adapters: Sequence[Adapter]) -> list[EnginePart]:
    """Return the parts of an engine."""
    draft = config.rollout.draft
    return [SOURCES[draft.method](draft)] if draft.is_on else []
