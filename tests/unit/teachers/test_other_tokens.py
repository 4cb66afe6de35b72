"""A teacher with another tokenizer: spans of text by hand, and what they sum to."""

import numpy as np
import pytest
import torch

from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.features.teachers.other_tokens import OtherReader, spans_of
from tools.make_toy import build_tokenizer

POLICY, TEACHER = build_tokenizer(words=["12", "=1"]), build_tokenizer(words=["21"])


def reader(policy=POLICY, teacher=TEACHER, max_tokens=64):
    return OtherReader(policy, teacher, end_ids={policy.eos_token_id}, max_tokens=max_tokens)


def ids_of(text, tokenizer=POLICY, end=True):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if end else ids


def prompt(index, text):
    return Prompt(index, np.zeros(1, np.int32), text, "", None, {})


@pytest.mark.parametrize(
    ("text", "end", "spans"),
    [
        ("12+3=15", True, [(1, 2), (1, 1), (1, 1), (1, 2), (1, 1), (1, 1)]),
        ("1212", False, [(2, 3)]),  # 12 12 and 1 21 2
        ("21", True, [(2, 1), (1, 1)]),
        ("", True, [(1, 1)]),
        ("", False, []),
    ],
)
def test_a_span_ends_where_both_tokenizers_cut(text, end, spans):
    tokens, found = reader().response(ids_of(text, end=end))
    assert found == spans and tokens.tolist() == ids_of(text, TEACHER, end)


def test_tokens_without_a_common_cut_belong_to_the_last_span():
    assert spans_of({1: 1, 3: 2}, {1: 2, 2: 3, 3: 4}, (2, 4)) == [(1, 2), (1, 2)]
    assert spans_of({1: 1, 2: 2}, {1: 1}, (4, 3)) == [(4, 3)]  # bytes of no character at the end
    assert spans_of({2: 1}, {}, (3, 0)) == [(3, 0)]  # the teacher's tokenizer drops the text
    assert spans_of({}, {}, (0, 0)) == []


def test_random_tokens_keep_their_sum_and_one_tokenizer_its_tokens():
    rng = np.random.default_rng(0)
    responses = [rng.integers(5, len(POLICY), n).astype(np.int32) for n in (0, 1, 7, 30)]
    prompts = [prompt(0, "1+1="), prompt(1, "2+")]
    batch = Batch(
        [np.zeros(1, np.int32)] * 4,
        responses,
        groups=torch.tensor([0, 0, 1, 1]),
        truncated=torch.zeros(4, dtype=torch.bool),
        prompts=prompts,
    )
    old = torch.from_numpy(rng.normal(size=38)).float()
    read = reader().read(batch, {1, 2, 3})
    logprobs = torch.from_numpy(rng.normal(size=int(read.lengths.sum()))).float()
    found = read.in_policy_tokens(logprobs, old)
    assert [ids.tolist() for ids in read.prompt_ids[2:]] == [ids_of("2+", TEACHER, end=False)] * 2
    own, theirs, _ = read.spans.unbind(1)
    last = torch.cat([torch.zeros(1), own.cumsum(0)])[:-1].long().clamp(max=37)
    ratios = (found - old)[last[(own > 0) & (theirs > 0)]]
    assert float(ratios.sum()) == pytest.approx(float(logprobs.sum() - old.sum()), abs=1e-4)
    same = reader(teacher=POLICY).read(batch, {2})
    taught = same.in_policy_tokens(old, old)
    assert torch.equal(taught[1:8], old[1:8]) and not taught[:1].any() and not taught[8:].any()


def test_a_response_beyond_the_teachers_positions_is_refused():
    batch = Batch(
        [np.zeros(1, np.int32)],
        [np.array(ids_of("12" * 9), np.int32)],
        groups=torch.tensor([0]),
        truncated=torch.zeros(1, dtype=torch.bool),
        prompts=[prompt(0, "1+1=")],
    )
    assert len(reader(max_tokens=13).read(batch, {0}).prompt_ids[0]) == 2  # the last tokens of the prompt
    with pytest.raises(ValueError, match="11 tokens of the teacher, which has 11 positions; lower rollout"):
        reader(max_tokens=11).read(batch, {0})
