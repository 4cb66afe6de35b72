"""SPIN: self-play fine-tuning (arXiv:2401.01335), online.

The data's response to a prompt is the chosen one, and a response of the policy itself is the rejected one.
The reference is the policy pi_t that sampled this response. DPO's loss on such pairs (the paper's equation
4.7 with its logistic loss) moves the policy towards the data until the two cannot be distinguished:

    L = -E[ log sigmoid(beta (log pi(y_data)/pi_t(y_data) - log pi(y_own)/pi_t(y_own))) ]

The paper keeps pi_t for an iteration of thousands of pairs. Here an iteration is a step.

Left out: responses of the previous iteration, which the paper's later iterations add, because here the
reference is the policy that sampled.
"""

from functools import partial

from rl.algorithms.dpo import loss
from rl.data.batch import Batch, pair_up
from rl.phases.phases import Phases

NEEDS = ("samples", "responses", "preference")
DEFAULTS = {"rollout.samples_per_prompt": 1}


def collect(phases: Phases) -> Batch:
    prompts = phases.draw_prompts()
    data = phases.targets(prompts)
    own = phases.generate(prompts)
    return pair_up(chosen=data.select(own.groups.tolist()), rejected=own)


def learn(phases: Phases, batch: Batch) -> None:
    phases.log_probs(batch)
    # The opponent is the policy that generated the responses.
    phases.update(batch, partial(loss, config=phases.config, reference="old_logprobs"))
