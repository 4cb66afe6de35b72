"""Policy losses, one file each: one number per token, which `rl.objectives.aggregate` turns into the loss.

`objective.loss` is the name of a file, with '-' for '_'. A file defines one function of its own name. It also
defines `select_tokens` if the loss treats some tokens differently, selected by statistics over the whole
mini-batch. For example, `clip_cov.py` defines `clip_cov` and `select_tokens`. Positional parameters are
columns of `rl.training.packing.MicroBatch` (of `select_tokens`: columns of the mini-batch's `Batch`, with
`logprobs` under the present weights). Keyword-only parameters are keys of the section `objective`, and
`seed`.

A file declares its own keys of the section `objective` in a dataclass, as in `rl.objectives.advantages`.

A file begins with literals, which `rl.config.declarations` reads without running the file:

    USES_RATIO   False if the loss assumes that the present policy sampled every token (default: True)
    PER_SAMPLE   True if the loss is one number per sample: it requires one advantage per sample and
                 objective.aggregation=seq-mean-token-mean (default: False)
    RECIPE       keys of the section objective that follow from the loss as it was published
    ASCENDING    pairs of keys; the first key of a pair must be less than the second
    FORMULA      loss of a token for docs/algorithms.md. ratio = pi(y_t)/pi_old(y_t); A: advantage; sg: no
                 gradient
    SOURCE       arXiv numbers

Conventions of all files. `T` response tokens of `B` samples of one micro-batch, laid end to end:

    logprobs: floating [T], log-probabilities of the tokens under the policy being trained
    old_logprobs: floating [T], log-probabilities under the policy at the start of the step, without a graph
    advantages: floating [T], without a graph
    mask: bool or 0/1 [T], the tokens that count
    lengths: int64 [B], tokens of each sample, zeros allowed
    selected_tokens: bool or 0/1 [T], result of `select_tokens`
    loss_weights: floating [T], weights of `rollout_correction`, None without them; a loss that does not read
        them is multiplied by them

At masked positions the inputs may hold anything, NaN included. They are replaced before the first nonlinear
operation, so neither value nor gradient depends on them. A token's loss depends on its own sample only if the
loss reads `lengths`, and otherwise on the token only. A mini-batch may therefore be cut between any two
samples. It returns the loss to be minimised, [T], 0 at masked positions, and statistics: sums over the
unmasked tokens, without a graph, each a scalar tensor. Divided by the count of unmasked tokens they are
verl's metrics of the same names:

    ppo_kl: old - new log-probability, the k1 estimate of KL(old || new); log-ratio clamped. All losses have
        it.
    pg_clipfrac: tokens where the clip binds; each loss says when
    pg_clipfrac_lower: tokens where a second bound binds

In formulas r = exp(logprobs - old_logprobs), A is the advantage, and sg stops the gradient.
"""
