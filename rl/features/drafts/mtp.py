"""Training of the head for multi-token prediction (`training.mtp`), beside the updates of the policy.

In each update, after the forward pass of a micro-batch through the policy's layers, the head
(`rl.models.mtp`) computes its own forward and backward pass from their detached output:

    loss = KL(p || q)    p: the policy's distribution of token t + 2, q: the head's, both at the temperature

It is the soft cross-entropy less the policy's entropy; the entropy has no gradient. Embedding and output head
are the policy's, detached. Gradients, their norm and the optimizer are the head's own, so the policy's update
is bitwise the same as without a head. Rejection sampling accepts a draft with probability sum_v min(p, q).

Only responses are learned from, from the second token on: the prompt's last state predicts the first token,
before any draft. For example, a response of 5 tokens gives 4 terms of the loss.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rl.checks.batches import CheckFailed
from rl.config.needs import has_prediction_head
from rl.config.run_models import RunModel
from rl.config.schema import Config, Training
from rl.data.batch import Batch
from rl.models import mtp
from rl.models.layout import Weight
from rl.training.attention import PackedRow
from rl.training.engine import TrainingEngine
from rl.training.grid import Grid
from rl.training.layer_form import norm
from rl.training.layer_spec import DuplicatedLinear, block_spec, megatrons_names, use_te
from rl.training.logprobs import Softmax, gathered
from rl.training.model import Policy, transformer_config
from rl.training.packing import MicroBatch
from rl.training.parts import TrainerPart
from rl.training.rotary import rotate_by_row
from rl.training.weights import WeightMap


class HeadChunk(MegatronModule):
    """The head on a rank of the last pipeline stage; on other stages it has no parameters."""

    def __init__(self, config: TransformerConfig, hf: dict, grid: Grid) -> None:
        super().__init__(config)
        self.pre_process = self.share_embeddings_and_output_weights = False  # Megatron reads both
        self.mtp = nn.Module()
        if not grid.is_last_stage:
            return
        spec = block_spec(config).layer_specs
        options = dict(parallel_mode="duplicated", config=config, init_method=config.init_method)
        with megatrons_names(config):
            self.mtp.layer = build_module(
                spec[-1], config=config, layer_number=len(spec) + 1, pg_collection=grid.groups
            )
        self.mtp.enorm, self.mtp.hnorm, self.mtp.norm = (norm(config) for _ in range(3))
        self.mtp.eh_proj = DuplicatedLinear(2 * config.hidden_size, config.hidden_size, **options)
        rotate_by_row(self, hf, fused=config.apply_rope_fusion)

    @property
    def decoder(self) -> nn.Module:
        """The layers."""
        return self.mtp

    def forward(self, hidden: Tensor, embeddings: Tensor, row: PackedRow, rotary: Tensor) -> Tensor:
        """Return the last hidden states for the output head, in the shape of the arguments.

        hidden: states of the policy, [T, 1, H] or [T/tp, 1, H] under sequence parallelism. embeddings: of the
        token after each token of `hidden`. row, rotary: arguments of the policy's layers.
        """
        own: Any = self.mtp
        x, _ = own.eh_proj(torch.cat([own.enorm(embeddings), own.hnorm(hidden)], -1))
        x, _ = own.layer(x, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=row)
        return own.norm(x)


class PredictionHead(TrainingEngine):
    """The head of a policy. Its passes are parts of the policy's; TrainingEngine's passes are not used.

    Methods are collective over the last pipeline stage unless they say otherwise.
    """

    def __init__(self, policy: TrainingEngine, training: Training, lr: float):
        optimizer = replace(training.optimizer, lr=lr) if lr else None
        spec = replace(policy.spec, optimizer=optimizer, keeps_reference=False)
        # The head runs a backward pass in every micro-batch, and cannot tell which micro-batch is the last.
        super().__init__(spec, replace(training, overlap_gradients="off"), policy.grid, policy.device)
        self._policy, self._last = policy, policy.chunks[-1]
        self._embedding: Tensor | None = None

    def _build(self, hf: dict, training: Training, dtype: torch.dtype) -> list[HeadChunk]:
        config = transformer_config(hf, training, dtype, te=use_te(dtype))
        return [HeadChunk(config, hf, self.grid)]

    def _weights(self, hf: dict) -> list[Weight]:
        return mtp.weights(hf)

    @property
    def is_learning(self) -> bool:
        """Whether an update is between `begin` and `finish`. False on all stages but the last."""
        return self._embedding is not None

    def begin(self) -> None:
        """Prepare an update. Collective over the pipeline group."""
        self._begin_update()
        self._num_tokens = 0.0
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device.torch)
        first, grid = self._policy.chunks[0], self.grid
        if grid.pp == 1:
            self._embedding = first.embedding.word_embeddings.weight.detach()
        elif grid.is_first_stage:
            dist.send(
                first.embedding.word_embeddings.weight.detach(), group=grid.groups.pp, group_dst=grid.pp - 1
            )
        elif grid.is_last_stage:
            self._embedding = torch.empty_like(self._last.head_weight)
            dist.recv(self._embedding, group=grid.groups.pp, group_src=0)

    def learn(self, batch: Batch, micro: MicroBatch, hidden: Tensor, row: PackedRow, rotary: Tensor) -> None:
        """Add the gradient of a micro-batch, summed over its tokens.

        hidden: output of the policy's layers, [T, 1, H] or [T/tp, 1, H] under sequence parallelism.
        """
        group, [chunk], hidden = self.grid.groups.tp, self.wrapped, hidden.detach()
        gather = functools.partial(
            tensor_parallel.gather_from_sequence_parallel_region,
            tensor_parallel_output_grad=False,
            group=group,
        )
        divided = self.chunks[0].config.sequence_parallel
        with torch.enable_grad():
            out = chunk(hidden, self._embeddings(micro, divided=divided), row, rotary)
            out = gather(out) if divided else out
        states = (gather(hidden) if divided else hidden)[:, 0]
        index, weights = _learned_from(batch, micro)
        is_first = not self._num_tokens
        self._num_tokens += float(weights.sum())
        at, weights = micro.predict_at[index.to(states.device)], weights.to(states.device)
        target = states[at + 1]
        if is_first:
            _check_target(target, states, micro, index)
        chunk = max(1, self._last.head_chunk_tokens // 4)
        softmax = Softmax(self.spec.temperature, self._last.real_vocab_size, group, chunk)
        losses, accepted, gradient = prediction_loss(
            out.detach()[:, 0][at], target, self._last.head_weight.detach(), softmax
        )
        of_rows = torch.zeros_like(out)
        of_rows[:, 0][at] = gradient * weights[:, None].to(gradient.dtype)
        out.backward(of_rows)
        self._sums += torch.stack([losses @ weights, accepted @ weights]).double()

    def _embeddings(self, micro: MicroBatch, *, divided: bool) -> Tensor:
        """Return the embedding of the token after each token of the row, [T, 1, H].

        divided: this rank's [T/tp, 1, H]. As in vLLM, 0 at the first position of a sequence.
        """
        table, group = self._embedding, self.grid.groups.tp
        assert table is not None, "between begin and finish"
        tokens = micro.tokens[0].roll(-1) - group.rank() * len(table)
        here = (tokens >= 0) & (tokens < len(table)) & (micro.position_ids[0] > 0)
        found = table[tokens.clamp(0, len(table) - 1)] * here[:, None].to(table.dtype)
        if group.size() > 1:
            dist.all_reduce(found, group=group)
        return (found.chunk(group.size())[group.rank()] if divided else found)[:, None]

    def finish(self) -> dict[str, float]:
        """Take an optimizer step with the mean gradient over the tokens; return the metrics.

        Without tokens there are no metrics. Collective over the world. Raises as `TrainingEngine.update`.
        """
        self._embedding = None
        total = torch.tensor(
            self._num_tokens * self.grid.reports_results, dtype=torch.float64, device=self.device.torch
        )
        dist.all_reduce(total)
        scale = 1.0 / max(1.0, float(total))
        for chunk in self.wrapped:
            chunk.scale_gradients(scale)
        self.chunks[0].config.finalize_model_grads_func(self.wrapped)
        sums = dict(zip(("loss", "acceptance"), self._sums * scale)) if self.grid.is_last_stage else {}
        assert self.spec.optimizer is not None
        result = self._step(sums, lr=self.spec.optimizer.lr)
        return result.metrics | {"grad_norm": result.grad_norm} if total else {}


def _learned_from(batch: Batch, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return indices of response tokens, int64 [n], and masks of the tokens after them, float32 [n].

    Both are on the CPU. The last token of each response is left out: no token of the response follows it.
    """
    lengths = batch.lengths[micro.samples]
    is_last = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    is_last[lengths.cumsum(0)[lengths > 0] - 1] = True
    index = (~is_last).nonzero()[:, 0]
    return index, batch.column("mask")[micro.column_index[index + 1]].float()


def _check_target(target: Tensor, states: Tensor, micro: MicroBatch, index: Tensor) -> None:
    """Raise CheckFailed unless `target` has the policy's states that predict the tokens after `index`."""
    expected = states[micro.predict_at[index + 1].to(states.device)]
    if bool(((target != expected) & expected.isfinite()).any()):
        raise CheckFailed(
            "draft check: the head for multi-token prediction learns from other distributions of the policy "
            "than those of the tokens after the next one."
        )


@torch.no_grad()
def prediction_loss(
    hidden: Tensor, target: Tensor, weight: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(p || q) and sum min(p, q) at each token, float32 [T], and d KL / d hidden [T, H].

    p is the `softmax` of target and weight, q the one of hidden and weight.

    hidden, target: [T, H]. weight: [Vpad/tp, H]. Collective over the group; the results are identical on all
    its ranks.
    """
    group = softmax.group
    found = hidden.new_empty(2, len(hidden), dtype=torch.float32)
    gradient = torch.empty_like(hidden)
    for part in softmax.chunks(len(hidden)):
        both = [softmax.scaled_logits(x[part], weight) for x in (target, hidden)]
        totals = gathered(torch.stack([x.logsumexp(-1) for x in both]), group).logsumexp(0)
        log_p, log_q = (x.sub_(total[:, None]) for x, total in zip(both, totals))
        p, q = log_p.exp(), log_q.exp()
        found[:, part] = torch.stack([(p * (log_p - log_q)).sum(-1), torch.minimum(p, q).sum(-1)])
        gradient[part] = (q - p).div_(softmax.temperature).to(weight.dtype) @ weight
    if group.size() > 1 and len(hidden):  # as on all ranks of the group
        dist.all_reduce(found, group=group)
        dist.all_reduce(gradient, group=group)
    return *found, gradient


class MtpPart(TrainerPart):
    """The head of a policy, which learns, or drafts tokens in the engine, or both.

    lr: its learning rate; 0: it does not learn. is_served: whether the generation engine drafts with it.
    """

    def __init__(self, training: Training, *, lr: float, is_served: bool):
        self._training, self._lr, self._is_served = training, lr, is_served
        self._micro: tuple[Batch, MicroBatch] | None = None
        self._found: list[dict[str, float]] = []

    def attach(self, engine: TrainingEngine) -> None:
        """Build the head, and let it learn after the last layer of the policy. Collective over the world."""
        self.head = PredictionHead(engine, self._training, self._lr)
        base, own = engine.weight_map, self.head.weight_map
        self._joined = base.over([*base.weights, *own.weights], base.parameters | own.parameters)
        last = engine.chunks[-1]
        assert isinstance(last, Policy) and last.logits_scale == 1.0
        if self._lr and last.post_process:
            last.decoder.register_forward_hook(self._after_layers, with_kwargs=True)

    def models(self) -> dict[str, TrainingEngine]:
        return {"mtp": self.head}

    def served_map(self, weight_map: WeightMap) -> WeightMap:
        return self._joined if self._is_served else weight_map

    def exported_map(self, weight_map: WeightMap) -> WeightMap:
        return self._joined.over([*self._joined.weights, *mtp.copies(weight_map.hf)], self._joined.parameters)

    def before_update(self) -> None:
        if self._lr:
            self.head.begin()

    def after_update(self) -> None:
        self._micro = None
        if self._lr and (found := self.head.finish()):
            self._found.append(found)

    def micro_batch(self, batch: Batch, micro: MicroBatch) -> None:
        self._micro = batch, micro

    def _after_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], hidden: Tensor) -> None:
        # Checks run backward passes, too, but before the update.
        if torch.is_grad_enabled() and self.head.is_learning:
            assert self._micro is not None
            row, rotary = kwargs["packed_seq_params"], kwargs["rotary_pos_emb"]
            self.head.learn(*self._micro, hidden, row, rotary)

    def metrics(self) -> dict[str, float]:
        found, self._found = self._found, []
        names = found[0] if found else ()
        return {f"mtp/{name}": sum(each[name] for each in found) / len(found) for name in names}


def parts(config: Config, model: RunModel, base_of: "TrainingEngine | None") -> list[TrainerPart]:
    """Return the parts of the policy: its head for multi-token prediction, if the run has one."""
    if model.name != "policy" or not has_prediction_head(config):
        return []
    served = config.rollout.draft.method == "mtp"
    return [MtpPart(config.training, lr=config.training.mtp.head_lr, is_served=served)]
