"""Checks of the section `agents` against the rest of a configuration. Imported only if it is on."""

from rl.config.agent_plan import make_agent_plan
from rl.config.effects import whole_run
from rl.config.options import ConfigError
from rl.config.schema import Config, algorithm_of, needs_engine


def check_agents(config: Config) -> None:
    """Raise ConfigError, or ValueError for a malformed entry, if the section cannot be used."""
    agents, rollout = config.agents, config.rollout
    make_agent_plan(agents.environment, agents.kwargs, agents.tools, agents.sources)
    if not needs_engine(whole_run(config)):  # a replay may use the config of its run
        raise ConfigError(
            f"algorithm={config.algorithm} generates no responses, so the section agents has no effect; "
            "remove it."
        )
    needs = set(algorithm_of(config).needs)
    if "samples" in needs and needs & {"greedy_baseline", "responses"}:
        raise ConfigError(
            f"algorithm={config.algorithm} compares each sample with another response to its prompt, which "
            "an environment may fail to give; use grpo, rloo, reinforce_pp or ppo with the section agents."
        )
    if agents.on_rewrite == "new_row" and needs & {"preference", "implicit_reward"}:
        raise ConfigError(
            f"algorithm={config.algorithm} learns from whole responses, which agents.on_rewrite=new_row "
            "would split into rows; use agents.on_rewrite=refuse."
        )
    if config.watchdog.limits.environments <= agents.timeout_s:
        raise ConfigError(
            f"watchdog.limits.environments={config.watchdog.limits.environments:g} must exceed "
            f"agents.timeout_s={agents.timeout_s:g}, the limit of a single call; raise "
            "watchdog.limits.environments."
        )
    if agents.max_tokens_per_turn > rollout.max_response_tokens:
        raise ConfigError(
            f"agents.max_tokens_per_turn={agents.max_tokens_per_turn} is above "
            f"rollout.max_response_tokens={rollout.max_response_tokens}, the limit of all turns together; "
            "lower it, or use 0."
        )
    if rollout.deterministic and agents.order == "arrival":
        raise ConfigError(
            "rollout.deterministic=true needs agents.order=waves, because with arrival the order depends "
            "on how long the environments take; set agents.order=waves."
        )
