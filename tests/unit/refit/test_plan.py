"""Plans of small models for all ranks, executed on numpy arrays of element numbers and counted element by
element."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rl.models import qwen2
from rl.models.boxes import index, volume
from rl.models.layout import COLUMN, REPLICATED, ROW, VOCAB, Weight, expert_down, expert_gate_up
from rl.models.placement import RolloutPlacement, TrainingPlacement, count_experts, job_ranks, vllm_ranges
from rl.refit.plan import FAR_OUT, NEAR_OUT, SENDERS, Routing, cut_into_batches, plan_of
from rl.refit.traffic import loads_of, refit_traffic

ITEMSIZE = 2


def qwen(*, layers=4, tied=False, heads=4, kv_heads=4, hidden=8, ffn=12, vocab=100):
    return qwen2.weights(
        dict(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=ffn,
            vocab_size=vocab,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=4,
            tie_word_embeddings=tied,
        )
    )


def mixture(*, layers=4, experts=4, hidden=8, ffn=16):
    """A model with routed experts and a router's bias in float32."""
    out = [Weight(("embed.weight",), ((70, hidden),), "embed", "embed", VOCAB, first_stage=True)]
    for layer in range(layers):

        def weight(name, shapes, cut, layer=layer, **options):
            names = tuple(f"layers.{layer}.{part}" for part in name.split("+"))
            return Weight(
                names, shapes, name, f"layers.{layer}.{options.pop('into', name)}", cut, layer, **options
            )

        out += [
            weight("o.weight", ((hidden, 8),), ROW),
            weight("up.weight", ((16, hidden),), COLUMN),
            weight("gate.bias", ((experts,),), REPLICATED, float32=True),
        ]
        for e in range(experts):
            names = f"experts.{e}.gate.weight+experts.{e}.up.weight", f"experts.{e}.down.weight"
            out.append(weight(names[0], ((ffn, hidden),) * 2, expert_gate_up(e), expert=e, into="w13"))
            out.append(weight(names[1], ((hidden, ffn),), expert_down(e), expert=e, into="w2"))
    return [*out, Weight(("norm.weight",), ((hidden,),), "norm", "norm", REPLICATED)]


def dense_case(world, tp, pp, rollout_tp, rollout_pp=1, **options):
    weights = qwen(**options)
    return weights, TrainingPlacement(world, tp, pp, 4), RolloutPlacement(world, rollout_tp, 4, pp=rollout_pp)


def mixture_case(world, tp, pp, ep, etp, rollout_tp, rollout_ep=1):
    weights = mixture()
    experts = count_experts(weights)
    training = TrainingPlacement(world, tp, pp, 4, ep=ep, etp=etp, num_experts=experts)
    return weights, training, RolloutPlacement(world, rollout_tp, 4, ep=rollout_ep, num_experts=experts)


def between_roles(case, train, rollout):
    """The case with the two grids on these ranks of a job."""
    weights, training, generation = case
    return weights, replace(training, ranks=train), replace(generation, ranks=rollout)


CASES = {
    "same layout": dense_case(4, 2, 1, 2),
    "tp 2 pp 2 to tp 2": dense_case(4, 2, 2, 2),
    "tp 4 to tp 1": dense_case(4, 4, 1, 1),
    "dp 4 to tp 4, 2 KV heads": dense_case(4, 1, 1, 4, kv_heads=2),
    "tied, pp 4 to tp 2 pp 2": dense_case(8, 2, 4, 2, 2, tied=True),
    "tied, tp 2 pp 2 dp 4 to tp 4": dense_case(16, 2, 2, 4, tied=True),
    "experts ep 2": mixture_case(4, 2, 1, 2, 1, 2),
    "experts ep 2 etp 2 pp 2 dp 2": mixture_case(8, 2, 2, 2, 2, 4),
    "experts ep 4 pp 2 expert dp 2": mixture_case(16, 2, 2, 4, 1, 2),
    "experts ep 2 to whole experts on 2": mixture_case(8, 2, 2, 2, 1, 2, 2),
    "experts etp 2 to whole experts on 4": mixture_case(8, 2, 1, 2, 2, 4, 4),
    "experts ep 4 to whole experts on 4, tp 2": mixture_case(8, 1, 2, 4, 1, 2, 4),
    "experts ep 2 to whole experts on 4, tp 1": mixture_case(8, 2, 1, 2, 1, 1, 4),
    "roles, 1 to 1": between_roles(dense_case(1, 1, 1, 1), (1,), (0,)),
    "roles, tp 2 pp 2 to tp 2": between_roles(
        (qwen(tied=True), TrainingPlacement(4, 2, 2, 4), RolloutPlacement(6, 2, 4)),
        (0, 1, 2, 3),
        (4, 5, 6, 7, 8, 9),
    ),
    "roles, experts ep 2, interleaved": between_roles(
        mixture_case(4, 2, 1, 2, 1, 2), (0, 1, 4, 5), (2, 3, 6, 7)
    ),
    "roles, whole experts on 4, tp 2": between_roles(
        mixture_case(4, 2, 1, 2, 1, 2, 4), (0, 1, 2, 3), (4, 5, 6, 7)
    ),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    return CASES[request.param]


def routing_of(case, ranks_per_node=4):
    weights, training, rollout = case
    return Routing(weights, training, rollout, node_of=lambda rank: rank // ranks_per_node, itemsize=ITEMSIZE)


def plans_of(case, buffer_bytes=1 << 20):
    routing = routing_of(case)
    batches = cut_into_batches(routing, buffer_bytes)
    return [plan_of(routing, batches, rank) for rank in range(routing.world_size)]


def pieces_on(placement, weight, rank, side):
    """Pieces of the weight on a rank, [] if it holds none; from the ranks' coordinates, not from
    `holders`."""
    if rank not in job_ranks(placement):
        return []
    rank = job_ranks(placement).index(rank)
    last, stages = placement.pp - 1, placement.place(weight).stages
    if side == "vllm":
        if rank // placement.tp % placement.pp not in stages:
            return []
        if weight.expert is None or placement.ep == 1:
            return weight.vllm_pieces(placement.tp, rank % placement.tp)
        owner, index_there = divmod(weight.expert, placement.num_experts // placement.ep)
        here = ((index_there, index_there + 1),) if rank % placement.ep == owner else ()
        pieces = weight.vllm_pieces(1, 0) if here else []
        return [replace(piece, local_box=here + piece.local_box[1:]) for piece in pieces]
    per_stage = placement.world_size // (last + 1)
    if rank // per_stage not in stages:
        return []
    if weight.expert is None:
        return weight.megatron_pieces(placement.tp, rank % placement.tp)
    if (
        rank % per_stage // placement.expert_tp % placement.ep
        != weight.expert * placement.ep // placement.num_experts
    ):
        return []
    return weight.megatron_pieces(placement.expert_tp, rank % placement.expert_tp)


def masks(placement, weights, rank, side):
    """bool arrays of the Hugging Face elements that a rank holds, by name."""
    out = {}
    for weight in weights:
        for name, shape in zip(weight.hf, weight.shapes):
            out[name] = np.zeros(shape, bool)
        for piece in pieces_on(placement, weight, rank, side):
            out[piece.hf][index(piece.hf_box)] = True
    return out


def local_arrays(placement, weights, rank, side, fill):
    """The rank's parameters by weight's number; training ones hold `fill[hf]`, others -1."""
    sizes = {}
    name = (lambda number, weight: weight.vllm) if side == "vllm" else (lambda number, weight: number)
    pieces = {number: pieces_on(placement, weight, rank, side) for number, weight in enumerate(weights)}
    for number, weight in enumerate(weights):
        for piece in pieces[number]:
            stops = tuple(stop for _, stop in piece.local_box)
            sizes[name(number, weight)] = tuple(map(max, stops, sizes.get(name(number, weight), stops)))
    arrays = {key: np.full(shape, -1) for key, shape in sizes.items()}
    out = {n: arrays[name(n, weight)] for n, weight in enumerate(weights) if name(n, weight) in arrays}
    if side == "megatron":
        for number, weight_pieces in pieces.items():
            for piece in weight_pieces:
                out[number][index(piece.local_box)] = fill[piece.hf][index(piece.hf_box)]
    return out


def numbered(weights):
    """Every element of every tensor has a number of its own."""
    out, at = {}, 0
    for weight in weights:
        for name, shape in zip(weight.hf, weight.shapes):
            out[name] = np.arange(at, at + math.prod(shape)).reshape(shape)
            at += math.prod(shape)
    return out


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 700], ids=["one batch", "cut"])
def test_plans_fill_every_element_of_every_engine_once(case, buffer_bytes):
    weights, training, rollout = case
    plans, full = plans_of(case, buffer_bytes), numbered(weights)
    world = range(len(plans))
    trained = [local_arrays(training, weights, rank, "megatron", full) for rank in world]
    engines = [local_arrays(rollout, weights, rank, "vllm", full) for rank in world]

    def write(rank, weight, box, values):
        target = engines[rank][weight][index(box)]
        assert (target == -1).all(), "written twice"
        target[...] = values.reshape(target.shape)

    for plan in plans:
        for copy in plan.copies:
            write(
                plan.rank, copy.weight, copy.destination, trained[plan.rank][copy.weight][index(copy.source)]
            )
    for batches in zip(*(plan.batches for plan in plans), strict=True):
        on_the_way = {}
        for rank, batch in enumerate(batches):
            for message in batch.sends:
                values = [trained[rank][region.weight][index(region.local)] for region in message.regions]
                for peer in message.peers:
                    packed = np.concatenate([v.reshape(-1) for v in values])
                    on_the_way.setdefault((rank, peer), []).append((packed, message.num_bytes))
        for rank, batch in enumerate(batches):
            for message in batch.receives:
                (sender,) = message.peers
                values, num_bytes = on_the_way[sender, rank].pop(0)
                assert num_bytes == message.num_bytes
                at = 0
                for region in message.regions:
                    size = volume(region.local)
                    write(rank, region.weight, region.local, values[at : at + size])
                    at += size
                assert at == len(values)
        assert not any(on_the_way.values()), "sent and not received"
    for rank in world:
        for number, weight in enumerate(weights):
            for piece in pieces_on(rollout, weight, rank, "vllm"):
                found = engines[rank][number][index(piece.local_box)]
                assert (found.reshape(-1) == full[piece.hf][index(piece.hf_box)].reshape(-1)).all(), (
                    rank,
                    piece,
                )


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 700], ids=["one batch", "cut"])
def test_a_rank_receives_what_it_needs_and_does_not_hold(case, buffer_bytes):
    weights, training, rollout = case
    sizes = {name: 4 if weight.float32 else ITEMSIZE for weight in weights for name in weight.hf}
    for plan in plans_of(case, buffer_bytes):
        held, needed = (
            masks(*args, plan.rank, side)
            for *args, side in ((training, weights, "megatron"), (rollout, weights, "vllm"))
        )
        assert plan.bytes_received == sum(
            int((needed[name] & ~held[name]).sum()) * sizes[name] for name in needed
        )


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 4000, 700])
def test_batches_match_on_all_ranks_and_fit_the_buffer(case, buffer_bytes):
    plans = plans_of(case, buffer_bytes)
    assert len({tuple(batch.spans for batch in plan.batches) for plan in plans}) == 1
    spans = Counter(span for batch in plans[0].batches for span in batch.spans)
    assert set(spans.values()) <= {1}
    parts = defaultdict(set)
    for span in spans:
        parts[span.weight, span.parts].add(span.part)
    assert all(found == set(range(count)) for (_, count), found in parts.items())
    assert max(plan.peak_bytes for plan in plans) <= buffer_bytes


def test_a_weight_larger_than_the_buffer_is_divided_by_rows():
    weights = [Weight(("model.big.weight",), ((1000, 6),), "big", "big", REPLICATED)]
    # Stage 1 holds the weight, and rank 0 needs it.
    plans = plans_of((weights, TrainingPlacement(2, 1, 2, 2), RolloutPlacement(2, 1, 2)), 1200)
    assert max(plan.peak_bytes for plan in plans) <= 1200
    rows = [
        region.box[0]
        for batch in plans[0].batches
        for message in batch.receives
        for region in message.regions
    ]
    assert rows[0][0] == 0 and rows[-1][1] == 1000 and len(rows) >= 10
    assert all(before[1] == after[0] for before, after in zip(rows, rows[1:]))
    assert plans[1].bytes_sent == 1000 * 6 * ITEMSIZE and plans[1].bytes_received == 0


def test_messages_exceed_the_buffer_only_for_a_large_row():
    weights = [Weight(("model.wide.weight",), ((3, 5000),), "wide", "wide", REPLICATED)]
    plans = plans_of((weights, TrainingPlacement(2, 1, 2, 2), RolloutPlacement(2, 1, 2)), 1000)
    assert [plan.peak_bytes for plan in plans] == [5000 * ITEMSIZE] * 2
    assert len(plans[0].batches) == 3


def test_a_source_is_the_rank_itself_else_near_else_far():
    case = CASES["tied, tp 2 pp 2 dp 4 to tp 4"]
    weights, training, _ = case
    kinds = Counter()
    held = [masks(training, weights, rank, "megatron") for rank in range(16)]
    for plan in plans_of(case):
        for batch in plan.batches:
            for message in batch.receives:
                for region in message.regions:
                    assert not held[plan.rank][region.hf][index(region.box)].any()
                    holders = [r for r in range(16) if held[r][region.hf][index(region.box)].all()]
                    near = [r for r in holders if r // 4 == plan.rank // 4]
                    kinds[bool(near)] += 1
                    assert set(message.peers) <= set(near or holders)
    assert kinds[True] and kinds[False]


def test_replicas_share_the_sending():
    # For the ranks of the other stage's nodes all holders of a stage's weights are equal candidates.
    weights = qwen(layers=8)
    training, rollout = TrainingPlacement(32, 2, 2, 8), RolloutPlacement(32, 2, 8)
    routing = routing_of((weights, training, rollout))
    load = sum(loads_of(routing, cut_into_batches(routing, 1 << 20)))
    sent = load[NEAR_OUT] + load[FAR_OUT]
    for stage in (sent[:16], sent[16:]):
        for tp_rank in (0, 1):
            of_replicas = stage[tp_rank::2]
            assert of_replicas.max() <= 1.1 * of_replicas.mean()


def test_a_receiver_uses_all_candidate_senders():
    # Ranks 1 and 2 of each replica lack their quarter, which two ranks hold.
    routing = routing_of((qwen(layers=8), TrainingPlacement(4, 2, 1, 8), RolloutPlacement(4, 4, 8)))
    load = sum(loads_of(routing, cut_into_batches(routing, 1 << 20)))
    assert load[NEAR_OUT].min() > 0.7 * load[NEAR_OUT].max()


def test_a_rank_receives_from_few_ranks_of_a_large_world():
    case = mixture_case(512, 2, 2, 2, 1, 2)  # of 4 places in training, each held by 64 or 128 ranks
    weights, training, rollout = case
    traffic = refit_traffic(
        weights, training, rollout, ranks_per_node=8, itemsize=ITEMSIZE, buffer_bytes=1 << 20
    )
    near_in, far_in, near_out, far_out = traffic.partners
    assert 0 < far_in.max() <= SENDERS and near_in.max() <= 7
    assert far_out.max() <= 2 * SENDERS and far_out.sum() == far_in.sum() and near_out.sum() == near_in.sum()
    plan = plan_of(routing := routing_of(case, 8), cut_into_batches(routing, 1 << 20), 300)
    peers = {rank for batch in plan.batches for message in batch.receives for rank in message.peers}
    assert len(peers) == near_in[300] + far_in[300]


def test_replicas_receive_one_packed_message():
    routing = routing_of(dense_case(64, 4, 4, 1))
    plan = plan_of(routing, cut_into_batches(routing, 1 << 20), 0)
    (batch,) = plan.batches
    assert plan.bytes_sent > 10 * sum(message.num_bytes for message in batch.sends)
    pairs = [(peer, message.regions) for message in batch.sends for peer in message.peers]
    assert len(pairs) == len(set(pairs))


def test_pipeline_stages_send_at_the_same_time():
    routing = routing_of(dense_case(8, 2, 4, 2))
    batches = cut_into_batches(routing, 4000)
    first_half = sum(loads_of(routing, batches[: len(batches) // 2]))
    sent = (first_half[NEAR_OUT] + first_half[FAR_OUT]).reshape(4, 2).sum(1)
    assert sent.min() > 0.2 * sent.max()


def test_every_rank_makes_the_same_plans(case):
    expected = plans_of(case, 2000)
    for rank in range(len(expected)):
        routing = routing_of(case)  # as each rank computes it
        assert plan_of(routing, cut_into_batches(routing, 2000), rank) == expected[rank]


def test_loads_of_batches_are_those_of_the_plans(case):
    routing = routing_of(case)
    loads = loads_of(routing, cut_into_batches(routing, 1 << 20))  # nothing is cut
    total = sum(loads, np.zeros((5, routing.world_size)))
    for plan in plans_of(case):
        assert (
            plan.bytes_sent == total[3:, plan.rank].sum()
            and plan.bytes_received == total[1:3, plan.rank].sum()
        )


@pytest.mark.parametrize(
    "tp, pp, ep, etp", [(2, 2, 1, None), (2, 2, 4, 1), (1, 2, 2, 2), (4, 1, 2, 2), (2, 1, 8, 1)]
)
def test_ranks_are_in_megatrons_order(tp, pp, ep, etp):
    from megatron.core.parallel_state import RankGenerator

    world, order = 16, "tp-cp-ep-dp-pp"
    placement = TrainingPlacement(world, tp, pp, 4, ep=ep, etp=etp, num_experts=8)
    dense = RankGenerator(tp=tp, ep=1, dp=world // tp // pp, pp=pp, cp=1, order=order)
    expert_tp = tp if etp is None else etp
    routed = RankGenerator(tp=expert_tp, ep=ep, dp=world // expert_tp // ep // pp, pp=pp, cp=1, order=order)
    for generator, expert in ((dense, None), *((routed, e) for e in range(8))):
        for layer in range(4):
            weight = Weight(("w",), ((8,),), "w", "w", COLUMN, layer, expert=expert)
            holders = placement.holders(placement.place(weight))
            expected = set()
            stage = layer * pp // 4
            for group in generator.get_ranks("tp"):
                in_stage = all(
                    rank in [ranks[stage] for ranks in generator.get_ranks("pp")] for rank in group
                )
                ep_group = next(ranks for ranks in generator.get_ranks("ep") if group[0] in ranks)
                if in_stage and (expert is None or ep_group.index(group[0]) == expert * ep // 8):
                    expected |= {(rank, tp_rank) for tp_rank, rank in enumerate(group)}
            assert set(zip(holders.ranks.tolist(), holders.tp_ranks.tolist())) == expected, (expert, layer)


@pytest.mark.parametrize("layers, pp", [(4, 2), (61, 16), (7, 3), (3, 2), (5, 4)])
def test_stages_of_the_engine_are_vllms(layers, pp):
    from vllm.distributed.utils import get_pp_indices

    assert vllm_ranges(layers, pp) == tuple(get_pp_indices(layers, stage, pp) for stage in range(pp))


def test_impossible_layouts_are_refused():
    for make, text in (
        (lambda: TrainingPlacement(8, 3, 1, 4), "tp=3 x pp=1 does not divide 8"),
        (lambda: TrainingPlacement(8, 1, 8, 4), "pp=8 exceeds the 4 layers"),
        (
            lambda: TrainingPlacement(8, 2, 2, 4, ep=4, num_experts=8),
            "ep=4 x etp=2 does not divide the 4 ranks",
        ),
        (lambda: TrainingPlacement(8, 1, 1, 4, ep=8, num_experts=12), "ep=8 does not divide 12"),
        (lambda: RolloutPlacement(8, 16, 4), "tp=16 x pp=1 does not divide 8"),
        (lambda: RolloutPlacement(8, 4, 4, ep=2, num_experts=8), "ep=2 must be a multiple of tp=4"),
        (lambda: RolloutPlacement(8, 4, 4, ep=4, num_experts=6), "ep=4 does not divide 6 routed experts"),
        (lambda: routing_of(([], TrainingPlacement(8, 1, 1, 4), RolloutPlacement(4, 1, 4))), "8 ranks"),
    ):
        with pytest.raises(ValueError, match=text):
            make()


def test_a_layout_without_some_elements_is_refused():
    broken = replace(COLUMN, megatron=lambda names, shapes, tp, rank: COLUMN.megatron(names, shapes, tp, 0))
    weights = [Weight(("model.w",), ((8, 2),), "w", "w", broken, 0)]
    with pytest.raises(ValueError, match="not held exactly once"):
        plans_of((weights, TrainingPlacement(2, 2, 1, 1), RolloutPlacement(2, 1, 1)))
