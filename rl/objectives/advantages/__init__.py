"""Advantage estimators, one file each: from the rewards of a whole batch to one number per token.

`objective.advantage` is the name of a file, with '-' for '_' and '++' for '_pp'. A file defines one function
of its own name. Positional parameters are columns of `rl.data.batch.Batch`, except in gae and prime: the
files of their algorithms call these. Keyword-only parameters without a default are keys of the section
`objective`, or of a section that NEEDS names. For example, `grpo(rewards, groups, *, normalize_by_std)` reads
two columns and the key objective.normalize_by_std. An estimator that reads `lengths` returns one advantage
per token, [T]; any other returns one per sample, [N], which every token of the sample gets.

Keys of the section objective that no other file declares are the fields of a dataclass <Name>Options, each
with a default, a range (`rl.config.ranges`) and a text for --help, for example `TurnReturnOptions`. The class
may use names of dataclasses, typing and `rl.config.ranges` only, because torch is not imported yet.

A file begins with literals, which `rl.config.declarations` reads without running the file:

    NEEDS      what the algorithm must provide, in the words of rl.config.declarations.NEEDS
    PER_TOKEN  True if the advantage differs between the counted tokens of a sample (default: False)
    FORMULA    formula for docs/algorithms.md. r: reward of a sample; G: samples of its prompt; N: samples of
               the batch
    SOURCE     arXiv numbers

Conventions of all files. `N` samples of the batch over all ranks, so that no statistic needs a collective;
`T` response tokens of all samples, laid end to end; `T'` unmasked response tokens. `groups` is int64 [N]:
samples with the same number have the same prompt. `lengths` is int64 [N], sums to T, and may hold zeros.
`mask` is bool or 0/1 [T]. A masked token is no time step: the token before it is followed by the next
unmasked one. Masked positions may hold anything, NaN included, and get 0. A group of one has no other sample
to compare with and gets exactly 0 (verl gives its raw reward); so does a group of equal rewards. Computations
are in float64, results have the dtype of the first argument, and advantages are constants of the policy
gradient, so nothing is differentiable.
"""
