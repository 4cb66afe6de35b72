"""Starts and holds the environments of a replica, with the `Chat` that converts their messages to tokens."""

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rl.config import wing
from rl.config.agents import Agents
from rl.config.schema import Config
from rl.data.prompts import Prompt, end_token_ids
from rl.features.agents.chat import Chat
from rl.features.agents.pool import EnvironmentPool
from rl.features.agents.sight import Sight
from rl.models import read_hf_config
from rl.rewards.pool.pool import default_workers

if TYPE_CHECKING:  # a web server, which only agents that run by themselves need
    from rl.features.agents.endpoint import Endpoint
    from rl.features.agents.session import Session

log = logging.getLogger(__name__)


@dataclass
class Environments:
    """The environments on the leader of a replica."""

    config: Agents
    pool: EnvironmentPool
    chat: Chat
    make_endpoint: "Callable[[], Endpoint]"
    """Starts the server for agents that call the engine over HTTP themselves."""
    sight_of: Callable[[Prompt], Sight] = Sight
    """Function that returns the `Sight` of a prompt: the images that a trajectory of this prompt sees."""
    kept: "dict[str, Session]" = field(default_factory=dict)
    """Sessions of trajectories that continue in a later call, by address."""
    endpoint: "Endpoint | None" = None
    """The server that `make_endpoint` started; None until the first such agent runs."""

    def start_endpoint(self) -> "Endpoint":
        """Return the server for agents that call the engine themselves. The first call starts it."""
        self.endpoint = self.endpoint or self.make_endpoint()
        return self.endpoint

    def keep(self, session: "Session") -> None:
        """Keep a session for a later call. A session that still waits for a process is closed instead."""
        if session.address in self.pool.waiting:
            self.stop_agent(session)
            self.pool.close(session.address)
        else:
            self.kept[session.address] = session
            self.pool.keep(session.address)

    def take(self, address: str) -> "Session | None":
        """Return a kept session, which the caller continues; None if no session has this address."""
        if (session := self.kept.pop(address, None)) is not None:
            self.pool.keep(address, False)
        return session

    def keep_only(self, samples: Collection[tuple[int, int]]) -> None:
        """Close all kept sessions except the sessions of `samples`.

        samples: pairs of the prompt's draw and the sample's number in its group.
        """
        for address, session in list(self.kept.items()):
            if (session.start.prompt.draw, session.start.number) not in samples:
                del self.kept[address]
                self.stop_agent(session)
                self.pool.close(address)

    def stop_agent(self, session: "Session") -> None:
        """Refuse the present and later requests of an agent that calls the engine itself."""
        if self.endpoint is not None and session.is_driving:
            self.endpoint.close(session.address)
        session.is_driving = False
        session.inbox.clear()

    def close(self) -> None:
        """Close the environments and end their processes."""
        if self.endpoint is not None:
            self.endpoint.shutdown()
        self.pool.shutdown()


def start_environments(
    config: Config, tokenizer: PreTrainedTokenizerBase, kept: Collection[int]
) -> Environments | None:
    """Start the environments of this replica. Returns None on ranks that do not lead a replica of the engine.

    kept: ids of special tokens that stay in the text of a turn.

    Call this function before the engines are built. An engine pins this thread to a core, and processes that
    start later would inherit the pinning. Raises ValueError if the environments cannot be loaded, or if the
    chat template is not suitable for them.
    """
    agents = config.agents
    if dist.get_rank() % config.rollout.tp:
        return None
    own_cores = "SLURM_CPUS_PER_TASK" in os.environ  # the task is bound to its cores
    leaders = 1 if own_cores else max(1, int(os.environ["LOCAL_WORLD_SIZE"]) // config.rollout.tp)
    chat = Chat(
        tokenizer,
        end_token_ids=end_token_ids(config.model.path) | set(config.rollout.stop_token_ids),
        on_rewrite=agents.on_rewrite,
        template_kwargs=agents.template_kwargs,
        kept=kept,
        uses_renderer=not config.data.image_key,
    )
    log.info("tokens between turns: %s", chat.description)
    if agents.container.image:
        describe = wing.door_of("containers", "description")
        log.info("%s", describe(**asdict(agents.container)))
    pool = EnvironmentPool(
        agents.plan,
        workers=agents.workers or default_workers(leaders),
        timeout_s=agents.timeout_s,
        memory_mib=agents.memory_mib,
        max_output_chars=agents.max_output_chars,
        interpreter=agents.interpreter,
        variables=agents.variables,
    )

    def make_endpoint() -> "Endpoint":
        from rl.features.agents.endpoint import Endpoint

        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        return Endpoint(tokenizer, context_tokens=longest, wake=pool.wake)

    environments = Environments(agents, pool, chat, make_endpoint, _sight_of(config))
    try:
        for tools in pool.check():
            chat.check(tools)
            if tools and agents.structured_tool_calls:
                chat.grammar(tools)
    except ValueError:
        environments.close()
        raise
    return environments


def _sight_of(config: Config) -> Callable[[Prompt], Sight]:
    if not config.data.image_key:
        return Sight
    from rl.data.images import image_format
    from rl.features.agents.seen_images import SeenImages

    path = config.model.path
    format = image_format(path, read_hf_config(path), max_pixels=config.data.max_pixels)
    return partial(SeenImages, format)
