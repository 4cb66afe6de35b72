"""The samples of a step: identical on every rank, on the CPU.

A batch has `N` samples. `T` is the number of response tokens of all samples together. A token column has
shape [T], sample after sample, and a sample column has shape [N]. Both are float32 unless another dtype is
given. A column is None until a phase of the step fills it.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.data.columns import EXTRA, Column, per_sample, per_token
from rl.data.held import HeldColumn, concatenate_columns
from rl.data.messages import Messages
from rl.data.prompts import Prompt


@dataclass(eq=False)
class Batch:
    prompt_ids: list[np.ndarray]
    """Prompt tokens: N arrays, int32 [P_i]."""
    response_ids: list[np.ndarray]
    """Response tokens: N arrays, int32 [R_i]; R_i may be 0."""
    groups: Tensor = per_sample(torch.int64, required=True, stored="int32", stored_as="group")
    """Index of each sample's prompt among the prompts of this step, in the order in which they were drawn."""
    truncated: Tensor = per_sample(torch.bool, required=True, stored="bool")
    """Whether the response ended at the length limit."""
    prompts: list[Prompt] = field(default_factory=list)
    """The prompt of each group; empty if the groups of the batch are not prompts."""
    trajectories: Tensor | None = per_sample(torch.int64, stored="int32", stored_as="trajectory")
    """Index of the trajectory that each sample (row) belongs to. None: each sample is its own trajectory."""
    turns: Tensor | None = per_token(torch.int32, stored="int32")
    """For a token that the policy sampled: the number of its turn, from 1. For a token that the policy was
    given: minus the index of the token's source in `rl.rollout.samples.SOURCES`. For example, a token sampled
    in the second turn has 2, and a token of a tool's output has 0. None: every response has one turn."""
    mask: Tensor = per_token(in_loss=True, stored="int8")
    """1 for tokens that the policy sampled. 0 for other tokens, for example a tool's output, and for rejected
    tokens. Default: 1 for all tokens."""
    rollout_logprobs: Tensor | None = per_token(in_loss=True, stored="float32")
    """Log-prob that the engine gave each token, in the distribution that it sampled from."""
    weight_versions: Tensor | None = per_token(torch.int32, in_loss=True, stored="int32")
    """Version of the policy that sampled each token (`TrainingEngine.version`)."""
    old_logprobs: Tensor | None = per_token(in_loss=True, stored="float32", learned=True)
    """Log-prob that the trainer gave each token before the updates of this step."""
    deferred_at: int | None = None
    """Set if `log_probs` left `old_logprobs` for the only update of the step to compute: the number of
    updates that the policy had made by then. None: nothing was left."""
    ref_logprobs: Tensor | None = per_token(in_loss=True, stored="float32", learned=True)
    """Log-prob that the reference policy gave each token."""
    advantages: Tensor | None = per_token(in_loss=True, stored="float32", learned=True)
    token_rewards: Tensor | None = per_token()
    """Reward of each token. Its sum over a sample is the sample's entry in `rewards`, unless the sample's
    mask is 0 everywhere."""
    samples_per_unit: int = 1
    """Number of consecutive samples kept in one micro-batch, for example 2 for pairs."""
    generated_by: Tensor | None = per_sample(torch.int64)
    """Rank that generated each sample; negative for samples from a file."""
    seeds: Tensor | None = per_sample(torch.int64)
    """Seed with which the engine says that it sampled each sample's first tokens; -1 if unknown."""
    sampled_with: Tensor | None = per_sample(torch.int64)
    """Code of the sampling parameters that the engine had for each sample
    (`rl.rollout.sampling.parameters_code`); -1 if unknown."""
    digests: Tensor | None = per_sample(torch.int64)
    """Hash of each sample's prompt, response and `truncated` flag, computed when the engines delivered the
    sample (`hash_samples`)."""
    scores: Tensor | None = per_sample(stored="float32", stored_as="score")
    """Score that the reward function gave each sample."""
    score_digests: Tensor | None = per_sample(torch.int64)
    """Hash of each sample's score, outcome and digest, computed when the sample was scored
    (`hash_scores`)."""
    rewards: Tensor | None = per_sample(stored="float32", stored_as="reward")
    """Scores after penalties and the KL term. Advantages are computed from them."""
    score_details: dict[str, Tensor] = field(default_factory=dict)
    """Other numbers that the reward function returned, by name: float32 [N] each. NaN where it returned no
    such number for a sample."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Columns that only one algorithm or option has, by name (`rl.data.columns.EXTRA`), once they are
    filled."""
    held: dict[str, HeldColumn] = field(default_factory=dict)
    """Columns whose rows only some ranks hold, by name (`rl.data.held`)."""
    conversations: list[Messages] | None = None
    """The conversation of each sample's trajectory: N lists of messages. None unless a reward model or a
    judge reads them."""
    feedback: list[str | None] | None = None
    """Text that the reward function returned about each sample. None unless the prompt of a teacher contains
    it."""

    def __post_init__(self) -> None:
        if self.mask is None:  # left out by the caller
            self.mask = torch.ones(int(self.lengths.sum()))
        self.extra = dict(self.extra)  # so that a copy made by `replace` has its own dict

    def __len__(self) -> int:
        return len(self.response_ids)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of all token ids."""
        return fingerprint(self.prompt_ids + self.response_ids)

    def hashes(self) -> dict[str, int]:
        """Return a hash of the token ids (`ids`) and of each filled column and detail of the scores, by name.

        The hashes must be identical on all ranks. Held columns are left out, because only some ranks have
        their rows.
        """
        return {"ids": self.fingerprint} | {
            name: zlib.crc32(column.contiguous().numpy().data)
            for name, column in (self.columns() | self.score_details).items()
        }

    @cached_property
    def lengths(self) -> Tensor:
        """Number of response tokens of each sample, int64 [N]."""
        return torch.tensor([len(ids) for ids in self.response_ids], dtype=torch.int64)

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """Number of prompt tokens of each sample, int64 [N]."""
        return torch.tensor([len(ids) for ids in self.prompt_ids], dtype=torch.int64)

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [N + 1]: first position of each sample in a token column, and at the end the column's
        length."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @property
    def sampled_lengths(self) -> Tensor:
        """Number of response tokens of each sample that the policy sampled itself, int64 [N].

        The other response tokens were given to the policy, for example by a tool.
        """
        if self.turns is None:
            return self.lengths
        return segment_counts(self.turns > 0, self.lengths)

    @property
    def trajectory_lengths(self) -> Tensor:
        """Number of response tokens of each trajectory, summed over its rows, int64 [trajectories]."""
        return self.lengths if self.trajectories is None else self.merge_rows().lengths

    @property
    def expects_held(self) -> bool:
        """Whether forward passes may need held columns.

        A batch that no engine of this run sampled, for example a teacher's batch, has none.
        """
        return bool(self.held) or self.rollout_logprobs is not None

    def merge_rows(self) -> "Batch":
        """Return a view for statistics with one sample per trajectory.

        The response of a trajectory is the responses of its rows, end to end, so the token columns do not
        change. In a sample column, a trajectory has the value of its first row. Held columns are left out.
        If no trajectory has several rows, the view is the batch itself.
        """
        if self.trajectories is None:
            return self
        counts = torch.unique_consecutive(self.trajectories, return_counts=True)[1]
        firsts = (counts.cumsum(0) - counts).tolist()
        rows = [range(first, first + count) for first, count in zip(firsts, counts.tolist())]
        merged = replace(self, held={}, trajectories=None, digests=None, score_digests=None).select(firsts)
        tokens = {name: value for name, value in self.columns().items() if COLUMNS[name].is_per_token}
        response_ids = [np.concatenate([self.response_ids[i] for i in own]) for own in rows]
        return replace(merged, response_ids=response_ids).with_columns(tokens)

    def last_turn(self, sample: int) -> np.ndarray:
        """Return the tokens of a sample's last turn, int32; its whole response if the batch has no
        `turns`."""
        ids = self.response_ids[sample]
        if self.turns is None:
            return ids
        turns = self.turns[self.offsets[sample] : self.offsets[sample + 1]].numpy()
        return ids[turns == turns.max(initial=1)]

    def of_trajectories(self, values: Tensor) -> Tensor:
        """Return for each sample the value of its trajectory.

        values: [trajectories], in the order of `merge_rows`.
        """
        if self.trajectories is None:
            return values
        return values[torch.unique_consecutive(self.trajectories, return_inverse=True)[1]]

    def tokens_of(self, samples: list[int]) -> Tensor:
        """Return the positions of the samples' tokens in a token column, sample by sample, int64."""
        index = torch.tensor(samples, dtype=torch.int64)
        lengths = self.lengths[index]
        # Within a sample, position in the column - position in the result is constant: the shift.
        shift = self.offsets[index] - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)

    def select(self, samples: list[int]) -> "Batch":
        """Return these samples, in this order, with all filled columns."""
        index, tokens = torch.tensor(samples, dtype=torch.int64), self.tokens_of(samples)
        lists = {name: values for name in LISTS if (values := getattr(self, name)) is not None}
        columns = {
            name: value[tokens if COLUMNS[name].is_per_token else index]
            for name, value in self.columns().items()
        }
        return self.with_columns(
            columns,
            score_details={name: column[index] for name, column in self.score_details.items()},
            held={name: column.select(samples) for name, column in self.held.items()},
            **{name: [values[i] for i in samples] for name, values in lists.items()},
        )

    def hash_samples(self) -> Tensor:
        """Return a hash of each sample's prompt, response and `truncated` flag, int64 [N]."""
        samples = zip(self.prompt_ids, self.response_ids, self.truncated.tolist(), strict=True)
        found = [
            zlib.crc32(ids.data, zlib.crc32(prompt.data, len(ids)) ^ ended) for prompt, ids, ended in samples
        ]
        return torch.tensor(found, dtype=torch.int64)

    def hash_scores(self, digests: Tensor) -> Tensor:
        """Return a hash of each sample's score, outcome and digest, int64 [N]."""
        assert self.scores is not None, "the batch has not been scored"
        columns = torch.stack((self.scores, self.outcomes), dim=1).numpy()
        pairs = zip(columns, digests.tolist(), strict=True)
        return torch.tensor([zlib.crc32(own.tobytes(), digest) for own, digest in pairs])

    def delivered(self) -> "Batch":
        """Fill `digests` and return the batch. Call it when the samples are complete."""
        self.digests = self.hash_samples()
        return self

    def columns(self) -> dict[str, Tensor]:
        """Return the filled token and sample columns by name. Raises ValueError as `check_extra` does."""
        self.check_extra()
        own = {name: value for name in FIELDS if (value := getattr(self, name)) is not None}
        return own | self.extra

    def check_extra(self) -> None:
        """Raise ValueError for a column of `extra` that EXTRA does not declare, or declares in another form.

        `columns` calls this method, and every phase reads `columns`. Therefore a wrong column is refused
        before a forward pass reads it.
        """
        for name, value in self.extra.items():
            if name in FIELDS:
                raise ValueError(f"Batch.extra has {name}, which is a field of Batch; set batch.{name}.")
            if name not in EXTRA:
                raise ValueError(
                    f"Batch.extra has {name}, but only {', '.join(EXTRA)} are declared; declare the column "
                    "in EXTRA of rl/data/columns.py."
                )
            size = int(self.offsets[-1]) if EXTRA[name].is_per_token else len(self)
            form, found = f"Tensor {EXTRA[name].dtype} [{size}] on cpu", type(value).__name__
            if isinstance(value, Tensor):
                found += f" {value.dtype} {list(value.shape)} on {value.device.type}"
            if found != form:
                unit = "response token" if EXTRA[name].is_per_token else "sample"
                raise ValueError(
                    f"Batch.extra has {name} as {found}, but EXTRA of rl/data/columns.py declares one value "
                    f"per {unit}, {form}; give it this form, or change the declaration."
                )

    def column(self, name: str) -> Tensor:
        """Return a column. Raises ValueError if no phase has filled it."""
        columns = self.columns()
        if name not in columns:
            raise ValueError(f"the batch has no {name}; its columns are {', '.join(columns)}")
        return columns[name]

    def with_columns(self, columns: Mapping[str, Tensor], **changes: Any) -> "Batch":
        """Return a copy of the batch with these columns set. changes: other fields to set."""
        extra = self.extra | {name: value for name, value in columns.items() if name in EXTRA}
        changes |= {name: value for name, value in columns.items() if name not in EXTRA}
        return replace(self, extra=extra, **changes)

    def named(self, name: str) -> object:
        """Return the column or property that a formula reads by this name; None if there is none."""
        return self.extra[name] if name in self.extra else getattr(self, name, None)

    def loss_columns(self) -> dict[str, Tensor]:
        """Return the filled token columns that losses may read."""
        return {name: column for name, column in self.columns().items() if name in LOSS_COLUMNS}

    def loss_sample_columns(self) -> dict[str, Tensor]:
        """Return the filled sample columns that losses may read."""
        columns = self.columns().items()
        return {
            name: column for name, column in columns if COLUMNS[name].in_loss and name not in LOSS_COLUMNS
        }

    def keep_groups(self, groups: list[int]) -> "Batch":
        """Return the samples of these groups, renumbered from 0 in the given order.

        An empty list gives an empty batch.
        """
        members: dict[int, list[int]] = {group: [] for group in groups}
        for i, group in enumerate(self.groups.tolist()):
            if group in members:
                members[group].append(i)
        kept = self.select([i for samples in members.values() for i in samples])
        sizes = torch.tensor([len(samples) for samples in members.values()], dtype=torch.int64)
        prompts = [self.prompts[group] for group in groups] if self.prompts else []
        if kept.trajectories is not None:
            kept.trajectories = kept.trajectories.unique(return_inverse=True)[1]
        return replace(kept, prompts=prompts, groups=torch.arange(len(groups)).repeat_interleave(sizes))

    @property
    def outcomes(self) -> Tensor:
        """Correctness of each sample, float32 [N].

        It is the `acc` that the reward function returned. If the function returned no `acc`, it is the score.
        If the function failed, it is 0.
        """
        assert self.scores is not None, "the batch has not been scored"
        worth = self.scores.masked_fill(self.score_details["failed"] > 0, 0.0)
        accuracy = self.score_details.get("acc", worth)
        return torch.where(accuracy.isnan(), worth, accuracy)


FIELDS: dict[str, Column] = {
    each.name: each.metadata["column"] for each in fields(Batch) if "column" in each.metadata
}
"""The columns that every algorithm has, by name."""
COLUMNS = FIELDS | EXTRA
"""The token and sample columns by name."""
LOSS_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.in_loss and column.is_per_token)
"""Token columns that losses may read."""
LISTS = ("prompt_ids", "response_ids", "conversations", "feedback")
"""Fields with a list of N entries."""


def segment_counts(flags: Tensor, lengths: Tensor) -> Tensor:
    """Return the number of true flags of each sample: bool [T], int64 [N] -> int64 [N]."""
    ends = torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.long().cumsum(0)])
    stops = lengths.cumsum(0)
    return ends[stops] - ends[stops - lengths]


def given_responses(
    prompt_ids: list[np.ndarray], response_ids: list[np.ndarray], masks: Sequence[np.ndarray] = ()
) -> Batch:
    """Return a batch of responses that come from the data instead of the policy. Each response is a group.

    masks: one array for each response, 1 for tokens that have a loss. Empty: all tokens have a loss.
    """
    batch = Batch(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        groups=torch.arange(len(prompt_ids)),
        truncated=torch.zeros(len(prompt_ids), dtype=torch.bool),
    )
    if masks:
        batch.mask = torch.from_numpy(np.concatenate(masks))
    return batch.delivered()


def data_responses(prompts: Sequence[Prompt]) -> Batch:
    """Return the data's own responses to prompts that have one."""
    ids = [prompt.token_ids for prompt in prompts]
    responses = [prompt.response_ids for prompt in prompts if prompt.response_ids is not None]
    masks = [prompt.response_mask for prompt in prompts if prompt.response_mask is not None]
    batch = given_responses(ids, responses, masks)
    if any(prompt.images for prompt in prompts):
        batch.prompts = list(prompts)
    return batch


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the samples of all batches, in order. The groups are renumbered.

    All batches must have the same columns filled.
    """
    first = batches[0]
    names = {name for batch in batches for name in batch.score_details}
    missing = torch.tensor(float("nan"))
    shared = [name for name in first.columns() if name not in ("groups", "trajectories")]
    columns = {name: torch.cat([batch.column(name) for batch in batches]) for name in shared}
    if any(batch.trajectories is not None for batch in batches):
        rows = [torch.arange(len(b)) if b.trajectories is None else b.trajectories for b in batches]
        columns["trajectories"] = _renumber(rows)
    columns["groups"] = _renumber([batch.groups for batch in batches], [len(b.prompts) for b in batches])
    return first.with_columns(
        columns,
        prompts=[prompt for batch in batches for prompt in batch.prompts],
        score_details={
            name: torch.cat([batch.score_details.get(name, missing.expand(len(batch))) for batch in batches])
            for name in sorted(names)
        },
        held={name: concatenate_columns([batch.held[name] for batch in batches]) for name in first.held},
        **{
            name: None if None in (parts := [getattr(batch, name) for batch in batches]) else sum(parts, [])
            for name in LISTS
        },
    )


def _renumber(indices: Sequence[Tensor], sizes: Sequence[int] = ()) -> Tensor:
    """Return the indices of all parts as one tensor, each part renumbered to begin after the part before it.

    For example, the parts [0, 1] and [0, 0] become [0, 1, 2, 2].

    sizes: number of different indices that each part may have. It is needed if the last of them may be
        missing in `indices`.
    """
    out, start = [], 0
    for place, part in enumerate(indices):
        out.append(part + start)
        largest = int(part.max()) + 1 if len(part) else 0
        start += max(largest, sizes[place] if sizes else 0)
    return torch.cat(out)


def pair_up(*, chosen: Batch, rejected: Batch) -> Batch:
    """Return a batch of pairs: sample 2k is the chosen response k, sample 2k + 1 the rejected response k.

    A pair has the group of its rejected response. Only token ids, `truncated`, masks and digests are copied.
    """
    assert len(chosen) == len(rejected), f"{len(chosen)} and {len(rejected)} responses"
    sides = (chosen, rejected)
    bare = [
        Batch(b.prompt_ids, b.response_ids, b.groups, b.truncated, mask=b.mask, digests=b.digests)
        for b in sides
    ]
    pairs = concatenate(bare).select([i + side * len(chosen) for i in range(len(chosen)) for side in (0, 1)])
    return replace(pairs, groups=rejected.groups.repeat_interleave(2), samples_per_unit=2)


def mismatch(batch: Batch, parts: Sequence[Sequence[int]]) -> Batch:
    """Return a batch in which each prompt has the response to another prompt.

    Within each part, a sample gets the response of the nearest earlier sample that has another prompt. Behind
    the first sample of the part, the search continues with the last one. If all samples of a part have the
    same prompt, a sample gets the response of the sample before it.

    parts: lists of indices of samples; each sample is in exactly one part. Only token ids, `truncated` and
        masks are kept.
    """
    previous = [0] * len(batch)
    for part in parts:
        for place, i in enumerate(part):
            before = [part[place - distance] for distance in range(1, len(part) + 1)]
            unlike = (j for j in before if not np.array_equal(batch.prompt_ids[j], batch.prompt_ids[i]))
            previous[i] = next(unlike, before[0])
    others = batch.select(previous)
    return Batch(
        batch.prompt_ids, others.response_ids, batch.groups, truncated=others.truncated, mask=others.mask
    )


def fingerprint(arrays: Sequence[np.ndarray]) -> int:
    """Return a 63-bit hash of int32 arrays, their lengths and their order."""
    lengths = np.fromiter(map(len, arrays), np.int32, len(arrays))
    digest = hashlib.blake2b(b"".join(array.data for array in (lengths, *arrays)), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
