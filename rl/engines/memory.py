"""The training models and the generation engine take turns with the memory of a rank."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from rl.config.schema import Config
from rl.engines.engines import Engines, offload_of
from rl.refit.refit import check_refit, refit, traffic_metrics
from rl.runtime.device import Device


class Turns:
    """Whose turn it is. Every rank calls the same methods; changing to the engine may refit, which is collective."""

    def __init__(self, config: Config, device: Device, engines: Engines):
        self.config, self.device, self.engines = config, device, engines
        self.offload = offload_of(config, device)
        self._num_refits = 0
        self._engine_has_weights_of = -1

    def to_engine(
        self, version: int, step: int, refitting: Callable[[], AbstractContextManager]
    ) -> dict[str, float]:
        """Wake the engine with the weights of `version`, a number of updates; returns the metrics of the refit, if there was
        one. `refitting` is entered around a refit."""
        policy, engine = self.engines.policy, self.engines.rollout
        assert engine is not None, "this run has no generation engine"
        slept, metrics = not engine.awake, {}
        self._send_away(weights=False)
        if slept:
            engine.wake_weights()
        if self._engine_has_weights_of != version or (self.device.is_cuda and slept):
            assert policy.has_weights, "the policy cannot have learned while the engine was awake"
            with refitting():
                traffic = refit(policy, engine, buffer_mib=self.config.refit.buffer_mib)
                metrics = traffic_metrics(traffic, self.device)
                self._engine_has_weights_of = version
                self._num_refits += 1
                every = self.config.refit.check_every
                if self._num_refits == 1 or (every and step % every == 0):
                    check_refit(policy, engine, buffer_mib=self.config.refit.buffer_mib)
        self._send_away(weights=True)
        if slept:
            engine.wake_cache()
        return metrics

    def to_training(self) -> None:
        """Put the engine to sleep and bring the training models back."""
        if self.engines.rollout is not None and self.engines.rollout.awake:
            self.engines.rollout.sleep()
        self.engines.reload()

    def _send_away(self, *, weights: bool) -> None:
        """What the training models do not need: gradients and optimizer state, and with `weights` those too."""
        if self.offload != "none":
            self.engines.offload(weights=weights and self.offload == "all")
