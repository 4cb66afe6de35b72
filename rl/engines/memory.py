"""Sharing of a rank's memory: the training models and the generation engine use it in turn."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rl.config.schema import Config
from rl.engines.engines import Engines, offload_of
from rl.refit.refit import check_refit, check_weights, refit, traffic_metrics
from rl.runtime.device import Device
from rl.training.engine import TrainingEngine


class MemorySharing:
    """Gives the memory to training or to generation. Every rank calls the same methods in the same order."""

    def __init__(self, config: Config, device: Device, engines: Engines):
        self.config, self.device, self.engines = config, device, engines
        self.offload = offload_of(config, device)
        self._num_refits = 0
        self.wait_for_readers: Callable[[], None] = lambda: None
        """Waits until nobody else reads the policy's weights; called before the weights change."""

    def to_generation(
        self, step: int, refit_phase: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, float]:
        """Wake the engine with the policy's current weights; return the metrics of the refit, if any.

        The refit happens if the engine holds another version of the weights, or lost the weights while it
        slept (CUDA). The refit is collective over the world and runs within `refit_phase()`. The engine's
        weights are compared with the policy's even without a refit, because the version may be wrong.
        """
        policy, engine = self.engines.policy, self.engines.rollout
        assert engine is not None, "this run has no generation engine"
        slept, metrics = not engine.awake, {}
        self._offload(weights=False)
        if slept:
            engine.wake_weights()
        if engine.weights_version != policy.version or (self.device.is_cuda and slept):
            assert policy.has_weights, "the policy cannot have learned while the engine was awake"
            with refit_phase():
                traffic = refit(policy, engine, buffer_mib=self.config.refit.buffer_mib)
                metrics = traffic_metrics(traffic, self.device)
                engine.weights_version = policy.version
                self._num_refits += 1
                every = self.config.refit.check_every
                if self._num_refits == 1 or (every and step % every == 0):
                    check_refit(policy, engine, buffer_mib=self.config.refit.buffer_mib)
        if policy.has_weights:
            check_weights(policy, engine, buffer_mib=self.config.refit.buffer_mib)
        self._offload(weights=True)
        if slept:
            engine.wake_cache()
        return metrics

    def to_training(self) -> None:
        """Put the engine to sleep and bring the training models back."""
        if self.engines.rollout is not None and self.engines.rollout.awake:
            self.engines.rollout.sleep()
        self.engines.reload()

    @contextmanager
    def lent(self, model: TrainingEngine) -> Iterator[None]:
        """Load the weights of a teacher onto the device for the duration of the block. Not collective."""
        model.reload()
        try:
            yield
        finally:
            if self.offload == "all":
                model.offload(weights=True)

    def _offload(self, *, weights: bool) -> None:
        """Offload gradients and optimizer state of the training models, and their weights if `weights`."""
        if self.offload != "none":
            self.engines.offload(weights=weights and self.offload == "all")
